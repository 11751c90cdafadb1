"""A server ends with the process that owns it, however that ends, and not earlier."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from outbox_devtools.embedded import find_binaries
from outbox_devtools.embedded.run_as_user import Account
from outbox_devtools.embedded.tempdir import PREFIX, can_reach, remove_abandoned
from tests.support.processes import family, running
from tests.support.prototypes import memory
from tests.support.waiting import until_sync

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[4]
ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="the parent-death signal is Linux's; elsewhere see sweep"
)


@contextmanager
def holder(major: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start packages/devtools/tests/embedded/holder.py in its own process group."""
    where = [str(memory())] if memory() else []
    started = subprocess.Popen(
        [
            options.pop("python", sys.executable),
            "-m",
            "packages.devtools.tests.embedded.holder",
            str(major),
            *where,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **{"cwd": ROOT, "process_group": 0, **options},
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


def read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


def swept(room: Path) -> bool:
    """Sweep, and return whether the directory of the dead owner is gone.

    A server that another test starts sweeps as well, and a concurrent sweep skips the directory.
    """
    remove_abandoned(room.parent)
    return not room.exists()


@ON_LINUX
def test_kill_9_of_the_parent_leaves_no_process(pg_major: int) -> None:
    with holder(pg_major) as process:
        server = read_line(process)
        processes = family(server["server_pid"])
        assert len(processes) > 3
        process.kill()
        process.wait()
        until_sync(lambda: not running(processes), what="the server to end with its parent")
    room = Path(server["data_dir"]).parent
    assert room.name.startswith(PREFIX)
    until_sync(lambda: swept(room), what="the room to be swept")


@ON_LINUX
@pytest.mark.one_major
def test_a_parent_killed_while_the_server_starts_leaves_no_process(pg_major: int) -> None:
    with holder(pg_major) as process:
        parent = psutil.Process(process.pid)
        started = until_sync(lambda: parent.children(recursive=True), what="the first child")
        process.kill()
        process.wait()
        until_sync(lambda: not running(started), what="what it started to end")


@pytest.mark.full
def test_ctrl_c_does_not_reach_the_server(pg_major: int) -> None:
    with holder(pg_major) as process:
        server = read_line(process)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate("\n", timeout=30)
        assert json.loads(output) == {"responses": True, "interrupts": 1}
        assert process.returncode == 0
    assert not psutil.pid_exists(server["server_pid"])
    assert not Path(server["data_dir"]).parent.exists()


@pytest.mark.full
@pytest.mark.one_major
def test_a_parent_that_exits_without_stopping_stops_the_server(pg_major: int) -> None:
    program = (
        "from outbox_devtools.embedded import EmbeddedPostgres\n"
        f"server = EmbeddedPostgres({pg_major}, settings={{'fsync': False}})\n"
        "server.start()\n"
        "print(server.pid, server.data_dir)\n"
        "raise SystemExit(7)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (7, "")
    pid, data_dir = ended.stdout.split()
    assert not psutil.pid_exists(int(pid))
    assert not Path(data_dir).parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="everything runs as an ordinary user already")
def test_the_server_runs_as_an_ordinary_user(pg_major: int, open_directory: Path) -> None:
    entry = pwd.getpwnam("nobody")
    user = Account(entry.pw_uid, entry.pw_gid, entry.pw_name)
    programs = find_binaries(pg_major).bin_dir
    if not can_reach(programs, user):
        pytest.skip(f"user nobody does not reach {programs}")
    # The user may not be able to read our files either, so it gets a copy.
    shutil.copytree(ROOT / "outbox", open_directory / "outbox")
    shutil.copytree(ROOT / "packages/devtools/outbox_devtools", open_directory / "outbox_devtools")
    helpers = Path("packages/devtools/tests/embedded")
    shutil.copytree(ROOT / helpers, open_directory / helpers)
    with holder(
        pg_major,
        python=python_of(user),
        cwd=open_directory,
        env={"OUTBOX_PG_BIN": str(programs)},
        user=user.uid,
        group=user.gid,
        extra_groups=[],
    ) as process:
        server = read_line(process)
        assert server["uid"] == user.uid
        processes = family(server["server_pid"])
        output, _ = process.communicate("\n", timeout=30)
        assert json.loads(output)["responses"]
    assert not running(processes)
    assert not Path(server["data_dir"]).parent.exists()


def python_of(user: Account) -> str:
    """Return a Python that this user can run."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(python).resolve()
        if path.exists() and can_reach(path.parent, user):
            probe = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(probe).returncode == 0:
                return python
    pytest.skip("there is no Python 3.11 that user nobody can run")
