"""`outbox snapshot`: take the position of a snapshot, and run a command on that snapshot."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import orjson
from asyncpg import PostgresError

from outbox.cli.common import (
    database,
    json_option,
    run_async,
    run_until_signal,
    settings_options,
    warn,
)
from outbox.cli.output import echo
from outbox.errors import OutboxError, UsageError
from outbox.producers.publish import snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO, Any

    from asyncpg import Connection

    from outbox.config import Settings

FLUSH_AFTER_S = 0.05
"""How long a position may wait for the disk before another session flushes the log."""
# The session of an operator ends when it is idle in a transaction; this one waits for a command.
NO_IDLE_LIMIT = "SET LOCAL idle_in_transaction_session_timeout = 0"
EXPORT = "SELECT pg_export_snapshot()"
# A commit that waits for the disk; without any, the log is flushed every 15 s.
FLUSH = """
SET LOCAL synchronous_commit = local;
SELECT pg_logical_emit_message(true, 'outbox', '')
"""
STDERR = 2


@click.command(
    # What follows the name of COMMAND belongs to it.
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  outbox snapshot --output position.txt -- pg_dump --snapshot={snapshot} app >dump.sql
  position=$(outbox snapshot -- pg_dump --snapshot={snapshot} -Fd -f dump app)
  outbox snapshot >position.txt    a bookmark: the events from now on come after it
""",
)
@click.option(
    "--output",
    type=click.File("w", lazy=False),
    metavar="FILE",
    help="Write the position to FILE, and leave stdout to COMMAND.",
)
@json_option
@settings_options
@click.argument("words", nargs=-1, metavar="[COMMAND...]")
def command(
    settings: Settings, words: tuple[str, ...], output: IO[str] | None, as_json: bool
) -> None:
    """Take the position of a snapshot, and run COMMAND on that snapshot.

    A position says exactly which events the snapshot saw: a receiver that is filled with what
    COMMAND reads continues with the events after the position.

    In the arguments of COMMAND, {snapshot} is replaced by the snapshot's id, for
    pg_dump --snapshot or SET TRANSACTION SNAPSHOT, and {position} by the position. COMMAND also
    has them as OUTBOX_SNAPSHOT and OUTBOX_POSITION. The snapshot's transaction is open until
    COMMAND ends, and VACUUM keeps what it may read.

    The position is printed when COMMAND has succeeded. What COMMAND writes to stdout goes to
    stderr, or with --output to stdout. The exit code of a COMMAND that fails is passed on, no
    position is printed, and FILE is empty.

    Without COMMAND the snapshot ends at once: the position is a bookmark in the events.
    """
    stdout = STDERR if output is None else None
    code, position = run_async(run_until_signal(_run(settings, words, stdout)))
    if code:
        warn(f"{words[0]} failed with exit code {code}; no position is printed")
        raise click.exceptions.Exit(code)
    line = orjson.dumps({"position": position}).decode() if as_json else position
    if output is None:
        echo(line)
    else:
        output.write(f"{line}\n")
        output.flush()


async def _run(settings: Settings, words: Sequence[str], stdout: int | None) -> tuple[int, str]:
    """Run a command on a snapshot; returns its exit code, and the position."""
    # A producer's role may take a position, and may not read the migration history.
    async with database(settings, current=False, long=True) as connection:
        # Ended by closing the connection: when the command has succeeded, nothing may fail.
        await connection.transaction(isolation="repeatable_read", readonly=True).start()
        await connection.execute(NO_IDLE_LIMIT)
        exported: str = await connection.fetchval(EXPORT)
        position = await _read_position(settings, connection)
        return await _execute(words, exported, position, stdout) if words else 0, position


async def _read_position(settings: Settings, connection: Connection[Any]) -> str:
    reading = asyncio.ensure_future(snapshot(connection, schema=settings.schema_name))
    while not (await asyncio.wait([reading], timeout=FLUSH_AFTER_S))[0]:
        with suppress(OutboxError, PostgresError, OSError):
            async with database(settings, current=False) as other:
                await other.execute(FLUSH)
    return await reading


async def _execute(words: Sequence[str], exported: str, position: str, stdout: int | None) -> int:
    """Run a command until it ends; returns its exit code, as a shell has it.

    Raises:
        UsageError: it cannot be started.
    """
    arguments = [
        word.replace("{snapshot}", exported).replace("{position}", position) for word in words
    ]
    environment = {**os.environ, "OUTBOX_SNAPSHOT": exported, "OUTBOX_POSITION": position}
    try:
        process = await asyncio.create_subprocess_exec(*arguments, stdout=stdout, env=environment)
    except OSError as error:
        raise UsageError(f"{words[0]}: cannot be started: {error.strerror}") from error
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
    return code if code >= 0 else 128 - code
