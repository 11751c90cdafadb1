"""Several processes that run the tests of one collection.

A pytest plugin: `--forks N`.  Each process of pytest-xdist imports and collects all tests again.
Here pytest collects them once and forks.  A process takes its next test from a file of indexes, and
sends its reports to the first process, which prints and counts.  Requires Linux: on other systems a
process may not use some libraries after a fork.

Tests that are marked `together(NAME)` and follow one another are taken by one process: what they
share, such as a browser or a compiled program, is made once.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.support.units import unit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNIT = struct.Struct("=II")

Message = tuple[str, Any]
"""What a process sends: the index of the test that begins or ended, or a report."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "together(name): one process runs all tests of this name")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("outbox").addoption(
        "--forks", type=int, default=0, metavar="N", help="run the tests in N processes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.forks or option.collectonly or session.testsfailed:
        return None  # pytest's own loop.
    with tempfile.TemporaryFile(buffering=0) as indexes:
        first = 0
        for _, tests in groupby(session.items, unit_of):
            count = len(list(tests))
            indexes.write(_UNIT.pack(first, count))
            first += count
        indexes.seek(0)
        sys.stdout.flush()
        children: dict[Connection, int] = {}
        for _ in range(min(option.forks, len(session.items))):
            receiver, sender = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                for each in (receiver, *children):
                    each.close()
                _run(session, indexes, sender)
                return True
            sender.close()
            children[receiver] = pid
        _Parent(session, indexes, children).watch()
    return True


class _Parent:
    """Receives the reports of the processes.

    Args:
        session: the session, with all tests.
        indexes: the file from which the processes take the indexes of their tests, as units: the
            first, and their number.
        children: the process behind each connection.
    """

    def __init__(
        self, session: pytest.Session, indexes: IO[bytes], children: dict[Connection, int]
    ) -> None:
        self._session = session
        self._indexes = indexes
        self._children = children
        self._running: dict[Connection, int] = {}
        self._left = set(range(len(session.items)))

    def watch(self) -> None:
        """Report until all processes have ended."""
        open_ones = set(self._children)
        try:
            while open_ones:
                for each in wait(list(open_ones)):
                    assert isinstance(each, Connection)
                    try:
                        self._receive(each, each.recv())
                    except EOFError:
                        open_ones.remove(each)
                        self._report_end(each)
            for index in sorted(self._left):
                self._fail(index, "it was not run, because the processes had ended")
        finally:
            self._indexes.truncate(0)  # No process finds a further test.
            for each in self._children:
                each.close()
            for each in open_ones:
                os.waitpid(self._children[each], 0)

    def _receive(self, child: Connection, message: Message) -> None:
        kind, content = message
        if kind == "begins":
            self._running[child] = content
        elif kind == "ended":
            self._left.discard(self._running.pop(child))
        else:
            hook, config = self._session.config.hook, self._session.config
            report = hook.pytest_report_from_serializable(config=config, data=content)
            hook.pytest_runtest_logreport(report=report)
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)

    def _report_end(self, child: Connection) -> None:
        _, status = os.waitpid(self._children[child], 0)
        if child in self._running:
            index = self._running.pop(child)
            self._left.discard(index)
            code = os.waitstatus_to_exitcode(status)
            self._fail(index, f"the process that ran it ended with the code {code}")

    def _fail(self, index: int, reason: str) -> None:
        item = self._session.items[index]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)


class _Sender:
    """Sends the reports of a process."""

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self._config = config
        self._reports = reports

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.send(("report", data))


def _run(session: pytest.Session, indexes: IO[bytes], reports: Connection) -> None:
    """Run tests until there are no more; the session ends afterwards as pytest's own would."""
    config = session.config
    # Plugins that write files about the whole run know by it that this process is not the first.
    config.workerinput = {}  # type: ignore[attr-defined]
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # Its files are those of the first process.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(_Sender(config, reports))

    def remaining() -> Iterator[int]:
        while read := os.read(indexes.fileno(), _UNIT.size):
            first, count = _UNIT.unpack(read)
            yield from range(first, first + count)

    indexes_left = remaining()
    index = next(indexes_left, None)
    while index is not None:
        following = next(indexes_left, None)
        reports.send(("begins", index))
        config.hook.pytest_runtest_protocol(
            item=session.items[index],
            nextitem=None if following is None else session.items[following],
        )
        reports.send(("ended", index))
        index = following
