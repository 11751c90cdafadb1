"""One running server: the process, everything it forked, and its end."""

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

from outbox.devtools.embedded.launch import command, environment, keeper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.devtools.embedded.run_as_user import Account


class ServerProcess:
    """A postmaster.

    It inherits the writing end of a pipe, and so does every process that it
    forks: the pipe ends exactly when the last of them is gone, which is when
    the cluster can be started again or removed.
    """

    def __init__(self, argv: Sequence[str], account: Account | None, log: Path, cwd: Path) -> None:
        self._started_at = time.time()
        self._alive_fd, held_fd = os.pipe()
        try:
            with log.open("ab") as output:
                self._popen = keeper.run(
                    lambda: subprocess.Popen(
                        command(argv, account),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment(),
                        cwd=cwd,
                        pass_fds=[held_fd],
                        # Its own group: Ctrl-C must not stop it before the relay drained.
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
        """None while it runs."""
        return self._popen.poll()

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to the postmaster, if it is still there."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no process of the server is left; False when time ran out."""
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
        """SIGKILL to every process of the server at once."""
        if self._popen.poll() is not None:
            return
        children = _children_of_stopped(self.pid) if sys.platform == "linux" else []
        self.ask(signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ready(self, data_dir: Path) -> bool:
        """Whether it accepts connections, as it says in its postmaster.pid."""
        try:
            lines = (data_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        # src/include/utils/pidfile.h: the process, the directory, the time it
        # started, ... and in line 8 its state.  The time matters: a file left by
        # an earlier server may name the same process number.
        if len(lines) < 8 or lines[0] != str(self.pid) or not lines[2].isdigit():
            return False
        return int(lines[2]) >= int(self._started_at) and lines[7].strip() == "ready"


def _children_of_stopped(pid: int) -> list[int]:
    """Stop our child `pid` and list its children.

    Stopped, it neither forks nor reaps any more; the kernel lists children
    reliably only then.  Where there is no /proc, PostgreSQL's processes notice
    by themselves that their postmaster is gone, only later when they are busy.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]
