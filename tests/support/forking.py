"""Commands that start at once: forked from a process that has imported what they need.

Most of the time of a short command is Python's imports.  Forked, it is a process of its own
all the same, with arguments, environment, streams and an exit code.  That a fresh Python can
start each of them is for others to see: `tests/cli/test_main.py`, and whoever starts a relay.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
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
    """Run `outbox` with these words to its end.

    Returns:
        The exit code (below zero: the signal that ended it), stdout and stderr.

    Raises:
        TimeoutError: it took longer, and was killed.
    """
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        news_fd, told_fd = os.pipe()
        with os.fdopen(news_fd, "rb", buffering=0) as news:
            try:
                _parent().ask(words, env, [given.fileno(), out.fileno(), err.fileno(), told_fd])
            finally:
                os.close(told_fd)
            async with asyncio.timeout(timeout_s):
                pid = int(await _line(news))
                try:
                    code = int(await _line(news))
                except BaseException:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    raise
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


async def _line(pipe: IO[bytes]) -> bytes:
    """The next line; each is written all at once."""
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
    """The process that has imported everything, as it is seen from here."""

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
                process_group=0,  # Ctrl-C is for those who asked.
            )
        atexit.register(self._end)

    def ask(self, words: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> None:
        """Have a command forked: with three streams, and a pipe that is told how it goes."""
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
    """Fork a command whenever one is asked for; returns in the command's process."""
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
                _bury(running)
            if control not in ready:
                continue
            head, fds, _, _ = socket.recv_fds(control, _LENGTH.size, 4)
            if not head:
                _leave(running)
            words, env, where = orjson.loads(_exactly(control, *_LENGTH.unpack(head)))
            told = fds.pop()
            if pid := os.fork():
                running[pid] = told
                os.write(told, b"%d\n" % pid)
                for fd in fds:
                    os.close(fd)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            for fd in (*fds, told, *running.values()):
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


def _bury(running: dict[int, int]) -> None:
    """Tell how those went that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = running.pop(pid)
        with suppress(BrokenPipeError):
            os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(told)


def _leave(running: Iterable[int]) -> NoReturn:
    """Nobody waits for them any more."""
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
        importlib.import_module(f"outbox.cli.{entry.name}")
    # What is there now stays: a copy would be made of each page that the collector touches.
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    code = main.run(sys.argv[1:])
    # As it stands in `_parent`'s process, too, nothing of it has to be taken apart.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
