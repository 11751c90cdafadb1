"""`outbox snapshot`: a command on an exported snapshot, and the snapshot's position."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import asyncpg
import psycopg
import pytest

from outbox.core.model.position import parse_position
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PROGRAM = (sys.executable, "-m", "outbox", "snapshot")
PUBLISH = "SELECT relay.publish('a.b', '1')"
# Publishes, and then counts the events that its snapshot shows.
COUNT_EVENTS = """
import os, sys, psycopg
with psycopg.connect(sys.argv[1], autocommit=True) as other:
    other.execute("SELECT relay.publish('a.b', '1')")
with psycopg.connect(sys.argv[1]) as connection:
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute(f"SET TRANSACTION SNAPSHOT '{sys.argv[2]}'")
    (count,) = connection.execute("SELECT count(*) FROM relay.outbox").fetchone()
assert os.environ["OUTBOX_SNAPSHOT"] == sys.argv[2]
assert os.environ["OUTBOX_POSITION"] == sys.argv[3].removeprefix("at:")
print("events:", count)
"""


@pytest.fixture
def published(database: Database) -> Database:
    with psycopg.connect(database.dsn) as connection:
        connection.execute(PUBLISH)
    return database


def run_snapshot(dsn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process: its command inherits descriptors."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        env={**os.environ, "OUTBOX_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_position_is_that_of_the_snapshot_that_the_command_reads(
    published: Database, tmp_path: Path
) -> None:
    words = (sys.executable, "-c", COUNT_EVENTS, published.dsn, "{snapshot}", "at:{position}")
    file = tmp_path / "position.txt"
    taken = run_snapshot(published.dsn, "--output", str(file), "--", *words)
    assert (taken.returncode, taken.stdout, taken.stderr) == (0, "events: 1\n", "")
    assert parse_position(file.read_text().removesuffix("\n")).seen == ((1, 1),)


def test_without_a_file_stdout_is_the_positions_alone(published: Database) -> None:
    taken = run_snapshot(published.dsn, "--", "echo", "of the command")
    assert (taken.returncode, taken.stderr) == (0, "of the command\n")
    assert parse_position(taken.stdout.removesuffix("\n")).seen == ((1, 1),)


@pytest.mark.usefixtures("published")
def test_without_a_command_the_position_is_a_bookmark(here: Command) -> None:
    taken = here("snapshot")
    assert taken.code == 0
    assert parse_position(taken.out.removesuffix("\n")).seen == ((1, 1),)
    assert here("snapshot", "--json").json == {"position": taken.out.removesuffix("\n")}


def test_a_command_that_fails_leaves_no_position(here: Command, tmp_path: Path) -> None:
    file = tmp_path / "position.txt"
    file.write_text("an earlier one")
    failed = here("snapshot", "--output", file, "sh", "-c", "exit 7")
    assert (failed.code, failed.out, file.read_text()) == (7, "", "")
    assert failed.err == "outbox: warning: sh failed with exit code 7; no position is printed\n"
    killed = here("snapshot", "sh", "-c", "kill -9 $$")
    assert (killed.code, killed.out) == (128 + 9, "")


def test_a_command_that_cannot_be_started_is_an_error(here: Command) -> None:
    failed = here("snapshot", "--", "no-such-program", "{snapshot}")
    assert failed.code == 2
    assert failed.error == "no-such-program: cannot be started: No such file or directory"


def test_a_snapshot_without_a_position_is_an_error(here: Command, database: Database) -> None:
    with psycopg.connect(database.dsn) as connection:
        connection.execute("UPDATE relay.incarnation SET by_xid = NULL")
    failed = here("snapshot", "--", "touch", "started")
    assert failed.code == 2
    assert failed.error.endswith("Start the relay, and begin another transaction.")
    assert not os.path.exists("started")  # noqa: PTH110


def test_a_command_may_be_this_program(here: Command) -> None:
    """It refuses variables that it does not know."""
    words = (sys.executable, "-m", "outbox", "status", "--json")
    assert here("snapshot", "--", *words).code == 0


async def test_a_producers_role_takes_positions(published: Database) -> None:
    async with role(published, "producer") as name:
        taken = await asyncio.to_thread(run_snapshot, dsn_of(published, name))
    assert (taken.returncode, taken.stderr) == (0, "")
    assert parse_position(taken.stdout.removesuffix("\n")).seen == ((1, 1),)


async def test_the_transaction_has_no_limit_and_ends_with_the_command(
    database: Database, tmp_path: Path
) -> None:
    """An operator's other sessions are ended when they are idle in a transaction for 10 s."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "--", "cat", str(fifo),
        env={**os.environ, "OUTBOX_DSN": database.dsn},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    # Returns when the command has opened it.
    writer = await asyncio.to_thread(fifo.open, "w")
    idle = "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox-cli'"
    connection = await asyncpg.connect(database.dsn)
    state = f"{idle} AND state = 'idle in transaction' AND datname = current_database()"
    assert await connection.fetchval(state) is not None
    writer.close()
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert parse_position(out.decode().removesuffix("\n")).seen == ()
    await connection.close()


async def test_an_interrupt_ends_the_command(database: Database, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "--", "cat", str(fifo),
        env={**os.environ, "OUTBOX_DSN": database.dsn},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with await asyncio.to_thread(fifo.open, "w"):
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 130
    assert process.stdout is not None
    assert await process.stdout.read() == b""
