"""`outbox status --watch`, on a terminal and on a pipe."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import sys
import termios
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.support.process import command_line, environment
from tests.support.relay import add_endpoint, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major
WATCH = ("status", "--watch", "--interval", "0.05")
TIMEOUT_S = 20
BEGIN, END = "\x1b[?1049h", "\x1b[?1049l"

# Makes the terminal at its stdin its own, as a shell does.
AT_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)

# Ctrl-C throws away what was typed before it; here, a key that was seen and not read yet.
CTRL_C_BEFORE_THE_READ = """
import os, signal, termios
def read(keyboard, size, read=os.read):
    termios.tcflush(keyboard, termios.TCIFLUSH)
    os.kill(os.getpid(), signal.SIGINT)
    return read(keyboard, size)
os.read = read
"""


def prepared(source: str) -> list[str]:
    """`outbox` in a process that executes this code first."""
    run = "import sys; from outbox.cli import main; sys.exit(main.run(sys.argv[1:]))"
    return [sys.executable, "-c", f"{source}\n{run}"]


async def ended(process: Process) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        return await process.wait()


# --------------------------------------------------------------------- pipe


@asynccontextmanager
async def on_a_pipe(database: Database, *more: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *command_line(*WATCH, *more),
        env=environment({"OUTBOX_DSN": database.dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        return (await process.stdout.readline()).decode()


async def seen(process: Process, wanted: str) -> dict[str, Any]:
    """The next line of JSON in which this key is not empty."""
    while True:
        response = orjson.loads(await line(process))
        if response.get(wanted):
            assert isinstance(response, dict)
            return response


async def test_a_pipe_gets_one_block_for_each_poll(database: Database) -> None:
    async with on_a_pipe(database) as process:
        for number in range(3):
            assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", await line(process))
            block = [await line(process)]
            while block[-1] != "\n" or len(block) < 9:
                block.append(await line(process))
            assert block[0] == "schema        relay\n"
            assert ("per second" in "".join(block)) == (number > 0)
            assert "\x1b" not in "".join(block)
        process.send_signal(signal.SIGINT)
        assert await ended(process) == 0
        assert process.stderr is not None
        assert await process.stderr.read() == b""


async def test_json_continues_when_the_database_returns(private_database: Database) -> None:
    server = private_database.server.embedded
    async with on_a_pipe(private_database, "--json") as process:
        first = orjson.loads(await line(process))
        assert (first["schema"], first["rates"]) == ("relay", None)
        rates = (await seen(process, "rates"))["rates"]
        assert rates == {"events": 0.0, "deliveries": 0.0, "ended": 0.0}
        await asyncio.to_thread(server.halt, immediate=True)
        away = await seen(process, "error")
        assert list(away) == ["schema", "at", "error", "since"]
        assert "run it again" not in away["error"]
        await asyncio.to_thread(server.start)
        assert (await seen(process, "cursor"))["cursor"]["high"] == 0
        process.terminate()
        assert await ended(process) == 0


@asynccontextmanager
async def with_patience_of(database: Database, seconds: float) -> AsyncIterator[Process]:
    source = f"from outbox.cli import watch; watch.ANSWER_TIMEOUT_S = {seconds}"
    process = await asyncio.create_subprocess_exec(
        *prepared(source), *WATCH, "--json",
        env=environment({"OUTBOX_DSN": database.dsn}),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def frozen(database: Database) -> AsyncIterator[None]:
    """Stop the server process of the command; its connection stays open."""
    sql = "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox-cli'"
    async with database.connection() as connection:
        (row,) = await connection.fetch(sql)
    os.kill(row["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(row["pid"], signal.SIGCONT)


@pytest.mark.full
async def test_an_unresponsive_server_is_reported(private_database: Database) -> None:
    async with with_patience_of(private_database, 0.5) as process:
        await seen(process, "rates")
        async with frozen(private_database):
            assert "lost" in (await seen(process, "error"))["error"]
            await seen(process, "cursor")
        process.send_signal(signal.SIGINT)
        assert await ended(process) == 0


async def test_it_can_be_stopped_while_it_waits_for_an_unresponsive_server(
    private_database: Database,
) -> None:
    async with with_patience_of(private_database, 2 * TIMEOUT_S) as process:
        await seen(process, "rates")
        async with frozen(private_database):
            process.send_signal(signal.SIGINT)
            assert await ended(process) == 0


async def test_a_closed_pipe_ends_it(database: Database) -> None:
    async with on_a_pipe(database, "--json") as process:
        await line(process)
        process.stdout._transport.close()  # type: ignore[union-attr]
        assert await ended(process) == 141


# ----------------------------------------------------------------- terminal


class Terminal:
    """A pseudo-terminal with the command."""

    def __init__(self, keyboard: int, process: Process) -> None:
        self._keyboard = keyboard
        self._raw = bytearray()
        self.process = process
        asyncio.get_running_loop().add_reader(keyboard, self._read)

    def _read(self) -> None:
        try:
            self._raw += os.read(self._keyboard, 65536)
        except OSError:  # The other end is closed.
            self.close()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._keyboard)

    @property
    def raw(self) -> str:
        return self._raw.decode(errors="replace")

    def screens(self) -> list[list[str]]:
        """The lines of each view so far; the last one may be incomplete."""
        return [
            [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", each).rstrip() for each in text.split("\r\n")]
            for text in self.raw.partition(BEGIN)[2].split("\x1b[H")[1:]
        ]

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def shows(self, text: str) -> list[str]:
        """Wait for a complete view that contains the text."""

        def found() -> list[str] | None:
            whole = self.screens()[:-1]
            return next((s for s in reversed(whole) if any(text in each for each in s)), None)

        picture = await until(found, TIMEOUT_S, f"{text!r} on the screen")
        assert picture is not None
        return picture


@asynccontextmanager
async def at_a_terminal(
    database: Database,
    columns: int = 80,
    rows: int = 24,
    *,
    program: Sequence[str] = tuple(command_line()),
    **env: str,
) -> AsyncIterator[Terminal]:
    # The size is the terminal's own; a test runner may have set these for itself.
    settings = environment({"OUTBOX_DSN": database.dsn, "TERM": "xterm-256color", **env})
    keyboard, tty = os.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AT_TERMINAL, *program, *WATCH,
        env={k: v for k, v in settings.items() if k not in ("COLUMNS", "LINES")},
        stdin=tty, stdout=tty, stderr=tty,
        start_new_session=True,
    )  # fmt: skip
    terminal = Terminal(keyboard, process)
    try:
        yield terminal
        # Whatever ended it, the terminal is as it was before.
        await ended(process)
        if BEGIN in terminal.raw:
            await until(lambda: END in terminal.raw, TIMEOUT_S, "the first screen")
        assert termios.tcgetattr(tty)[3] & termios.ICANON
        assert "Traceback" not in terminal.raw
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        terminal.close()
        os.close(keyboard)
        os.close(tty)


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
async def test_a_terminal_shows_one_view_until_q(database: Database, key: bytes) -> None:
    await add_endpoint(database, "shop")
    async with at_a_terminal(database) as terminal:
        await terminal.shows("per second")
        await publish(database, 1)
        picture = await terminal.shows("up to id 0 of 1, oldest event waiting for")
        assert len(picture) == 24
        assert max(map(len, picture)) <= 80
        assert any(each.startswith("shop ") for each in picture)
        assert "every 0.05 s; q to quit" in picture
        terminal.press(b"x")
        terminal.press(key)
        assert await ended(terminal.process) == 0


async def test_a_key_discarded_by_ctrl_c_is_not_waited_for(database: Database) -> None:
    async with at_a_terminal(database, program=prepared(CTRL_C_BEFORE_THE_READ)) as terminal:
        await terminal.shows("per second")
        terminal.press(b"x")
        assert await ended(terminal.process) == 0


async def test_a_small_terminal_keeps_the_footer_and_reports_hidden_lines(
    database: Database,
) -> None:
    for n in range(30):
        await add_endpoint(database, f"shop-{n:02}")
    async with database.connection() as connection:
        await connection.execute("UPDATE relay.endpoint SET state = 'paused'")
    async with at_a_terminal(database, 80, 24) as terminal:
        picture = await terminal.shows("and ")
        assert "every 0.05 s; q to quit" in picture
        shown = [each for each in picture if re.match(r"shop-\d\d ", each)]
        assert f"and {30 - len(shown)} endpoints more" in picture
        assert any("outbox endpoint resume shop-" in each for each in picture)
        terminal.resize(100, 70)
        taller = await until(
            lambda: next((s for s in terminal.screens()[:-1] if len(s) == 70), None), TIMEOUT_S
        )
        assert taller is not None
        assert sum(bool(re.match(r"shop-\d\d ", each)) for each in taller) > len(shown)
        terminal.press(b"q")


async def test_a_terminal_shows_that_the_database_is_unavailable(
    private_database: Database,
) -> None:
    server = private_database.server.embedded
    async with at_a_terminal(private_database) as terminal:
        await terminal.shows("per second")
        await asyncio.to_thread(server.halt, immediate=True)
        picture = await terminal.shows("database unavailable since ")
        # What was seen last stays.
        assert any(each.startswith("schema") for each in picture)
        terminal.press(b"q")
        assert await ended(terminal.process) == 0


async def test_a_dumb_terminal_gets_blocks(database: Database) -> None:
    async with at_a_terminal(database, TERM="dumb") as terminal:
        await until(lambda: terminal.raw.count("schema") > 2, TIMEOUT_S)
        assert BEGIN not in terminal.raw
        terminal.press(b"\x03")
        assert await ended(terminal.process) == 0
