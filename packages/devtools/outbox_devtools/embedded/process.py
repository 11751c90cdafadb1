"""A running server: the postmaster and its child processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from outbox_devtools.embedded.launch import command, environment, spawn_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_devtools.embedded.run_as_user import Account


class ServerProcess:
    """A postmaster process.

    It and every process that it forks inherit the write end of a pipe.  The pipe reaches EOF
    exactly when the last of them has ended; then the cluster can be restarted or removed.
    """

    def __init__(self, argv: Sequence[str], account: Account | None, log: Path, cwd: Path) -> None:
        self._started_at = time.time()
        self._alive_fd, held_fd = os.pipe()
        try:
            with open(log, "ab", opener=_open_private) as output:
                self._popen = spawn_thread.run(
                    lambda: subprocess.Popen(
                        command(argv, account),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment(),
                        cwd=cwd,
                        pass_fds=[held_fd],
                        # Own process group: Ctrl-C must not stop it before the relay drained.
                        process_group=0,
                    )
                )
        except BaseException:
            os.close(self._alive_fd)
            raise
        finally:
            os.close(held_fd)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._popen.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the postmaster, if it is running."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all processes of the server have ended; False on time-out."""
        if self._alive_fd >= 0:
            ended = select.poll()
            ended.register(self._alive_fd, select.POLLIN)
            if not ended.poll(timeout_s * 1000):
                return False
            os.close(self._alive_fd)
            self._alive_fd = -1
        self._popen.wait()
        return True

    def kill(self) -> None:
        """Send SIGKILL to every process of the server."""
        if self._popen.poll() is not None:
            return
        children = _children_of_stopped(self.pid) if sys.platform == "linux" else []
        self.send_signal(signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ready(self, data_dir: Path) -> bool:
        """Whether it accepts connections, according to postmaster.pid."""
        try:
            lines = (data_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        # src/include/utils/pidfile.h: line 1 is the pid, line 2 the directory, line 3 the start
        # time, line 8 the state.  The start time excludes a file of an earlier server with the
        # same pid.
        if len(lines) < 8 or lines[0] != str(self.pid) or not lines[2].isdigit():
            return False
        return int(lines[2]) >= int(self._started_at) and lines[7].strip() == "ready"


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user may read if it is created now."""
    return os.open(path, flags, 0o600)


def _children_of_stopped(pid: int) -> list[int]:
    """Stop the child `pid` with SIGSTOP and list its children.

    While stopped it neither forks nor reaps, so the kernel's list is reliable.  Without /proc
    the list is empty, and PostgreSQL's processes end by themselves when they notice the death
    of their postmaster.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]
