"""The process of the API as a child: its signals, and the errors around it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from pydantic import SecretStr

from outbox.config import Settings
from outbox.errors import CannotRun
from outbox.hosting.api_child import api_child
from outbox.web.address import Address
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from pathlib import Path

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


def child_process() -> psutil.Process | None:
    return next(
        (each for each in psutil.Process().children() if "outbox_api.child" in each.cmdline()), None
    )


async def test_an_error_beside_the_api_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="the relay cannot run"):
        async with api_child(settings_with(tmp_path / "dsn")):
            raise CannotRun("the relay cannot run")
    assert child_process() is None


async def test_a_child_says_why_it_cannot_start(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    settings = settings_with(file)
    file.write_text("postgresql://[")
    async with api_child(settings) as child:
        await until(lambda: child.problem is not None, LIVE_S, "the child to end")
        assert "OUTBOX_DSN_FILE is not a database address" in (child.problem or "")


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
