"""The limit of open files of the processes that serve."""

from __future__ import annotations

import resource

import pytest

from outbox.event_loop import OPEN_FILES_MAX, allow_many_sockets

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), 4096),
        ((1024, 1 << 30), OPEN_FILES_MAX),
        ((1024, NONE), OPEN_FILES_MAX),
        ((4096, 4096), None),
        ((100_000, 200_000), None),
        ((NONE, NONE), None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_is_of_use(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int | None
) -> None:
    """It is not lowered, and the hard limit stays."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: set_to.append(pair))
    allow_many_sockets()
    assert set_to == ([] if raised is None else [(raised, limits[1])])
