"""The process of the API as a child: its signals, and the errors around it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from outbox.config import Settings
from outbox.errors import CannotRun
from outbox.hosting.api_child import api_child
from outbox.web.address import Address
from outbox_api.child import (
    CHILD_MEMORY_MAX,
    CHILD_MEMORY_MIN,
    OOM_SCORE_ADJ_MAX,
    memory_bytes_max,
)
from tests.support.waiting import LIVE_S, until

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.skipif(os.name == "nt", reason="its signals are POSIX's"),
]

NO_DATABASE = "postgresql://127.0.0.1:1/none"


def settings_with(file: Path) -> Settings:
    file.write_text(NO_DATABASE)
    return Settings(
        dsn=SecretStr(NO_DATABASE),
        dsn_source="OUTBOX_DSN_FILE",
        secret_files={"dsn": str(file)},
        admin=Address("127.0.0.1", 0),
    )


def oom_score(process: str = "self") -> Path:
    return Path(f"/proc/{process}/oom_score_adj")


def read_score(process: str = "self") -> int:
    return int(oom_score(process).read_text())


def write_score(score: int) -> None:
    with suppress(PermissionError):
        oom_score().write_text(str(score))


def child_process() -> psutil.Process | None:
    return next(
        (each for each in psutil.Process().children() if "outbox_api.child" in each.cmdline()), None
    )


async def test_an_error_beside_the_api_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="the relay cannot run"):
        async with api_child(settings_with(tmp_path / "dsn")):
            raise CannotRun("the relay cannot run")
    assert child_process() is None


async def test_the_problem_of_a_child_that_cannot_start_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    settings = settings_with(file)
    file.write_text("postgresql://[")
    async with api_child(settings) as child:
        await until(lambda: child.problem is not None, LIVE_S, "the child to end")
        assert "OUTBOX_DSN_FILE is not a database address" in (child.problem or "")


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")
async def test_a_child_is_ended_before_its_relay_without_memory(tmp_path: Path) -> None:
    """Also if the relay is one of the first, as in a pod; an unprivileged one cannot go back."""
    before = read_score()
    write_score(max(before, 700))
    try:
        async with api_child(settings_with(tmp_path / "dsn")) as child:
            await until(lambda: child.is_up, LIVE_S, "a heartbeat")
            started = child_process()
            assert started is not None
            assert read_score(str(started.pid)) == OOM_SCORE_ADJ_MAX
    finally:
        write_score(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_child_that_starts_does_not_end_by_the_signals_of_its_relay(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A terminal and systemd send them to all processes, while the relay still drains."""
    async with api_child(settings_with(tmp_path / "dsn")) as child:
        await until(lambda: child_process() is not None, LIVE_S, "the child")
        started = child_process()
        assert started is not None
        started.send_signal(number)
        await until(lambda: child.is_up or child.problem is not None, LIVE_S, "a heartbeat")
        assert child.is_up
        assert child_process() == started
    assert not started.is_running()


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (None, CHILD_MEMORY_MAX),
        ("max", CHILD_MEMORY_MAX),
        (str(1 << 40), CHILD_MEMORY_MAX),
        (str(2 << 30), 512 << 20),
        (str(768 << 20), CHILD_MEMORY_MIN),
    ],
)
def test_the_memory_is_a_share_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, allowed: int
) -> None:
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(f"{limit}\n")
    monkeypatch.setattr("outbox_api.child.CONTAINER_MEMORY", path)
    assert memory_bytes_max() == allowed
