"""Fast commands: forked from a process that has imported all modules.

Imports take most of the time of a short command. A forked command is still a process with its own
arguments, environment, streams and exit code. Other tests check that a fresh interpreter can start
each command: `tests/cli/test_main.py`, and those that start a relay.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, NoReturn

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ROOT = Path(__file__).parents[2]
_LENGTH = struct.Struct("!I")


async def run(
    words: Sequence[str], env: Mapping[str, str], stdin: bytes, timeout_s: float
) -> tuple[int, bytes, bytes]:
    """Run `outbox` with these arguments to its end.

    Returns:
        The exit code (negative: the terminating signal), stdout and stderr.

    Raises:
        TimeoutError: it took longer and was killed.
    """
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        status_read_fd, status_fd = os.pipe()
        with os.fdopen(status_read_fd, "rb", buffering=0) as status_pipe:
            try:
                _parent().start_command(
                    words, env, [given.fileno(), out.fileno(), err.fileno(), status_fd]
                )
            finally:
                os.close(status_fd)
            async with asyncio.timeout(timeout_s):
                pid = int(await _line(status_pipe))
                try:
                    code = int(await _line(status_pipe))
                except BaseException:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    raise
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


async def _line(pipe: IO[bytes]) -> bytes:
    """The next line; each is written atomically."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(pipe, readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(pipe)
    line = pipe.readline()
    if not line:
        raise RuntimeError("the process that forks commands has ended")
    return line


class _Parent:
    """The client of the process that has imported all modules."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
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
        self, words: Sequence[str], env: Mapping[str, str], fds: Sequence[int]
    ) -> None:
        """Fork a command with three streams and a status pipe."""
        what = orjson.dumps([words, env, str(Path.cwd())])
        with self._lock:
            socket.send_fds(self._control, [_LENGTH.pack(len(what))], fds)
            self._control.sendall(what)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


_made: list[_Parent] = []


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
            head, fds, _, _ = socket.recv_fds(control, _LENGTH.size, 4)
            if not head:
                _leave(running)
            words, env, where = orjson.loads(_exactly(control, *_LENGTH.unpack(head)))
            status_fd = fds.pop()
            if pid := os.fork():
                running[pid] = status_fd
                os.write(status_fd, b"%d\n" % pid)
                for fd in fds:
                    os.close(fd)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            for fd in (*fds, status_fd, *running.values()):
                os.close(fd)
            for each in (control, ended, wakes):
                each.close()
            _become(words, env, where)
            return


def _exactly(control: socket.socket, size: int) -> bytes:
    what = b""
    while len(what) < size:
        what += control.recv(size - len(what))
    return what


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
