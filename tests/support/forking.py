"""Fast commands: forked from a process that has imported all modules.

Imports take most of the time of a short command. A forked command is still a process with its own
arguments, environment, streams and exit code. Other tests check that a fresh interpreter can start
each command: `tests/cli/test_main.py`, and `tests/e2e/test_kill.py` that it can be a relay.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, NoReturn

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ROOT = Path(__file__).parents[2]


async def run(
    words: Sequence[str],
    env: Mapping[str, str],
    stdin: bytes,
    timeout_s: float,
    directory: Path | None = None,
) -> tuple[int, bytes, bytes]:
    """Run `outbox` with these arguments to its end; see `start`.

    Returns:
        The exit code (negative: the terminating signal), stdout and stderr.

    Raises:
        TimeoutError: it took longer and was killed.
    """
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = await start(words, env, [given, out, err], directory)
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except BaseException:
            process.send_signal(signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


async def start(
    words: Sequence[str],
    env: Mapping[str, str],
    streams: Sequence[IO[bytes]],
    directory: Path | None = None,
) -> Process:
    """Start `outbox` with these arguments; it ends with this process.

    Args:
        words: the arguments.
        env: the environment.
        streams: stdin, stdout and stderr, or the last two of them.
        directory: the working directory; None: that of this process.
    """
    read_fd, write_fd = os.pipe()
    fds = [*(each.fileno() for each in streams), write_fd]
    try:
        _parent().start_command(words, env, fds, directory or Path.cwd())
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    process = Process(read_fd)
    await process.started
    return process


class Process:
    """A forked command: what tests use of `asyncio.subprocess.Process`.

    Args:
        status_fd: a pipe with its pid, and later its exit code; the process closes it.
    """

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.pid = 0
        self.started: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(status_fd, self._read)

    @property
    def returncode(self) -> int | None:
        """The exit code (negative: the terminating signal); None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self._ended.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self) -> None:
        part = os.read(self._status_fd, 64)
        self._received += part
        pid, *code = self._received.split(b"\n")[:-1] or [b""]
        if pid and not self.started.done():
            self.pid = int(pid)
            self.started.set_result(None)
        if code:
            self._ended.set_result(int(code[0]))
        elif not part:
            error = RuntimeError("the process that forks commands has ended")
            (self._ended if self.started.done() else self.started).set_exception(error)
        else:
            return
        self._loop.remove_reader(self._status_fd)
        os.close(self._status_fd)


class _Parent:
    """The client of the process that has imported all modules.

    Processes that are forked from this one use it, too: a request is one byte, with files.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the test process only.
            )
        atexit.register(self._end)

    def start_command(
        self, words: Sequence[str], env: Mapping[str, str], fds: Sequence[int], directory: Path
    ) -> None:
        """Fork a command with these streams, and a status pipe as the last of them."""
        with TemporaryFile(buffering=0) as what:
            what.write(orjson.dumps([words, env, str(directory)]))
            what.seek(0)
            socket.send_fds(self._control, [b"!"], [what.fileno(), *fds])

    def _end(self) -> None:
        if os.getpid() == self._owner_pid:
            self._control.close()
            self._process.wait()
        else:
            # Not this process's: Python would warn that it is left running.
            self._control.detach()
            self._process.returncode = 0


_made: list[_Parent] = []


def share() -> None:
    """Let the processes that are forked from this one use the same parent of commands."""
    _parent()


def _parent() -> _Parent:
    if not _made:
        _made.append(_Parent())
    return _made[0]


def _serve(control: socket.socket) -> None:
    """Fork a command per request; returns in the command's process."""
    ended, wakes = socket.socketpair()
    for each in (ended, wakes):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ended in ready:
                ended.recv(4096)
                _reap(running)
            if control not in ready:
                continue
            request, fds, _, _ = socket.recv_fds(control, 1, 5)
            if not request:
                _leave(running)
            with os.fdopen(fds.pop(0), "rb") as what:
                words, env, where = orjson.loads(what.read())
            status_fd = fds.pop()
            if pid := os.fork():
                running[pid] = status_fd
                os.write(status_fd, b"%d\n" % pid)
                for fd in fds:
                    os.close(fd)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate(fds, 3 - len(fds)):
                os.dup2(fd, number)
            for fd in (*fds, status_fd, *running.values()):
                os.close(fd)
            for each in (control, ended, wakes):
                each.close()
            _become(words, env, where)
            return


def _reap(running: dict[int, int]) -> None:
    """Report the exit codes of ended commands."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        status_fd = running.pop(pid)
        with suppress(BrokenPipeError):
            os.write(status_fd, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(status_fd)


def _leave(running: Iterable[int]) -> NoReturn:
    """Kill the running commands and exit: the test process is gone."""
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def _become(words: Sequence[str], env: Mapping[str, str], where: str) -> None:
    os.chdir(where)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.argv[1:] = words


def _main() -> None:
    from outbox.cli import main

    for entry in main.COMMANDS:
        entry.load()
    # Freeze the heap: the garbage collector would otherwise copy each page that it touches.
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    code = main.run(sys.argv[1:])
    # Exit without clean-up, because the state also exists in the parent process.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
