"""Workers of one application are found by their parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from outbox.config import Settings
from outbox.hosting import worker_processes
from outbox.hosting.worker_processes import WARNING, warn_about_workers, worker_pids
from outbox.store.cluster.replicas import ReplicaStore
from tests.support.relay import register

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Database

HOST = socket.gethostname()
ME, SIBLING, COUSIN, PARENT = 40, 41, 42, 7


class Processes:
    """A directory as /proc: what this process may read of it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path.mkdir()
        self._path = path
        monkeypatch.setattr(worker_processes, "PROCESSES", path)
        monkeypatch.setattr(os, "getpid", lambda: ME)
        monkeypatch.setattr(os, "getppid", lambda: PARENT)
        self.add("self", 0)

    def add(self, pid: int | str, parent: int, program: str | None = "/usr/bin/python3") -> None:
        """Add a process; without a program, it is another user's."""
        directory = self._path / str(pid)
        directory.mkdir()
        (directory / "stat").write_text(f"{pid} (a (worker) 1) S {parent} 7 7 0 -1")
        if program is not None:
            (directory / "exe").symlink_to(program)

    def end(self, pid: int) -> None:
        """Remove a process."""
        shutil.rmtree(self._path / str(pid))


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    processes = Processes(tmp_path / "proc", monkeypatch)
    processes.add(ME, PARENT)
    processes.add(SIBLING, PARENT)
    processes.add(COUSIN, 8)
    return processes


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("/usr/bin/python3", [ME, SIBLING]),
        ("/usr/lib/systemd/systemd", []),
        (None, []),
    ],
)
def test_workers_have_a_parent_that_runs_the_same_program(
    program: str | None, found: list[int], processes: Processes
) -> None:
    processes.add(PARENT, 1, program)
    others = [f"elsewhere:{SIBLING}", f"{HOST}:999", "a name", f"{HOST}:{COUSIN}"]
    own = [f"{HOST}:{ME}", f"{HOST}:{ME}", f"{HOST}:{SIBLING}"]
    assert worker_pids([*others, *own]) == found


@pytest.mark.one_major
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_worker_that_is_being_replaced_is_not_counted(
    replaced: bool, database: Database, processes: Processes, monkeypatch: Any, logs: list[Any]
) -> None:
    processes.add(PARENT, 1)
    monkeypatch.setattr(worker_processes, "END_S", 0)
    async with database.at_hand() as connection:
        for pid in (SIBLING, ME):
            await register(ReplicaStore(connection), name=f"{HOST}:{pid}")

    def end_workers(names: list[str]) -> list[int]:
        pids = worker_pids(names)
        if replaced:
            processes.end(SIBLING)
        return pids

    monkeypatch.setattr(worker_processes, "worker_pids", end_workers)
    await warn_about_workers(_set_event(), settings_for_dsn(database))
    warnings = [(each["event"], each["workers"]) for each in logs]
    assert warnings == ([] if replaced else [(WARNING, 2)])


@pytest.mark.parametrize(("concurrency", "warned"), [("4", True), ("1", False), ("", False)])
async def test_without_proc_a_variable_sets_the_number_of_workers(
    concurrency: str,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logs: list[Any],
) -> None:
    monkeypatch.setattr(worker_processes, "PROCESSES", tmp_path / "none")
    monkeypatch.setenv("WEB_CONCURRENCY", concurrency)
    await warn_about_workers(_set_event(), Settings())
    assert [each["event"] for each in logs] == ([WARNING] if warned else [])


@pytest.mark.system
async def test_a_database_that_is_away_is_no_error_of_the_check(
    processes: Processes, logs: list[Any]
) -> None:
    settings = Settings(dsn=SecretStr("postgresql://127.0.0.1:1/x"), dsn_source="dsn")
    await warn_about_workers(_set_event(), settings)
    assert logs == []


def settings_for_dsn(database: Database) -> Settings:
    return Settings(dsn=SecretStr(database.dsn), dsn_source="dsn", drain_s=0)


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
