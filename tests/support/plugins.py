"""Entry points as another installation may have them."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

import pytest

from outbox import plugins

if TYPE_CHECKING:
    from collections.abc import Iterator


class Distribution(NamedTuple):
    """What an entry point tells of its distribution."""

    name: str
    version: str


class FakeEntryPoint(NamedTuple):
    """An entry point whose object is there already; an exception is raised when it is loaded."""

    name: str
    dist: Distribution
    found: object

    def load(self) -> object:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@contextmanager
def installed(*entries: FakeEntryPoint) -> Iterator[None]:
    """Only these entry points are installed."""

    def forget() -> None:
        plugins.installed.cache_clear()
        plugins.load.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "entry_points", lambda **_: list(entries))
        forget()
        try:
            yield
        finally:
            forget()
