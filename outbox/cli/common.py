"""Shared parts of the commands: options, the database connection, warnings."""

from __future__ import annotations

import asyncio
import functools
import getpass
import shlex
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

from outbox.cli.output import echo, emit_json
from outbox.config import Settings, load
from outbox.core.model import duration
from outbox.core.model.cloud_metadata_ranges import network_warnings
from outbox.core.model.text import one_line
from outbox.errors import UsageError
from outbox.operations.rows import ID_MAX
from outbox.store.connection import dsn
from outbox.store.connection.operator import connect_current, connect_operator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
    from ipaddress import IPv4Network, IPv6Network

    from asyncpg import Connection

    from outbox.operations.rows import RowPage

    Network = IPv4Network | IPv6Network

P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_NAME = "outbox-cli"
LISTED_ROWS_MAX = 10_000
CLOSE_TIMEOUT_S = 2.0
EXIT_FAILED = 1

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON on stdout."
)
comment_option = click.option("--comment", metavar="TEXT", help="Reason, recorded in the journal.")
after_id_option = click.option(
    "--after", type=click.IntRange(0, ID_MAX), default=0, help="Only IDs above this (paging)."
)
names_argument = click.argument("names", nargs=-1, required=True, metavar="NAME...")
limit_option = click.option(
    "--limit",
    type=click.IntRange(1, LISTED_ROWS_MAX),
    default=100,
    show_default=True,
    help="Maximum number of rows.",
)


def settings_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add --dsn, --schema and --config; the command receives them as `settings`."""

    @functools.wraps(command)
    def with_settings(
        dsn: str | None, schema: str | None, config: str | None, **arguments: Any
    ) -> T:
        flags = {"dsn": dsn, "schema_name": schema}
        return command(settings=load(flags, config=config), **arguments)

    for option in (
        click.option("--config", metavar="FILE", help="Settings file; default: ./outbox.toml."),
        click.option(
            "--schema", metavar="NAME", help="Schema of the outbox tables; default: relay."
        ),
        click.option(
            "--dsn", metavar="DSN", help="Database DSN; prefer OUTBOX_DSN, because ps shows flags."
        ),
    ):
        with_settings = option(with_settings)
    return with_settings


def before_id_option(flag: str, metavar: str, help_: str) -> Callable[[Any], Any]:
    """An option for paging: only rows with lower ids."""
    return click.option(
        flag,
        metavar=metavar,
        type=click.IntRange(1, ID_MAX),
        default=ID_MAX,
        show_default=False,
        help=help_,
    )


def print_result(
    show: Callable[[T], None], *, failed: Callable[[T], object] = lambda _: False
) -> Callable[[Callable[..., T]], Callable[..., None]]:
    """Print the result that a command returns, and add --json and the settings to its options.

    Args:
        show: prints the result as text; with --json it is printed as JSON instead.
        failed: whether the exit code is 1 for this result.
    """

    def decorate(command: Callable[..., T]) -> Callable[..., None]:
        @json_option
        @settings_options
        @functools.wraps(command)
        def run(*, as_json: bool, **arguments: Any) -> None:
            result = command(**arguments)
            if as_json:
                emit_json(result)
            else:
                show(result)
            if failed(result):
                raise click.exceptions.Exit(EXIT_FAILED)

        return run

    return decorate


@asynccontextmanager
async def database(
    settings: Settings, *, current: bool = True, long: bool = False
) -> AsyncIterator[Connection[Any]]:
    """Open a database connection for one command.

    Args:
        current: check first that the schema has this program's version.  False for
            commands that only publish: a producer's role cannot read the migration history.
        long: whether its transactions may take any time.

    Raises:
        OutboxError: any error of `connect` and `require_current`.
    """
    address = dsn.from_settings(settings)
    for warning in address.warnings:
        warn(warning)
    connect = connect_current if current else connect_operator
    connection = await connect(address, settings, APPLICATION_NAME, long=long)
    try:
        yield connection
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    finally:
        # After a failure or Ctrl-C, do not wait for the server to close the connection.
        connection.terminate()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def run_connected(
    settings: Settings,
    work: Callable[[Connection[Any]], Awaitable[T]],
    *,
    current: bool = True,
    long: bool = False,
) -> T:
    """Run work on a database connection of its own, and return its result.

    Args:
        current, long: see `database`.

    Raises:
        OutboxError: as in `database`; and any error of the work.
    """

    async def run() -> T:
        async with database(settings, current=current, long=long) as connection:
            return await work(connection)

    return run_async(run())


def run_operation(
    settings: Settings,
    operation: Callable[Concatenate[Connection[Any], str, P], Awaitable[T]],
    /,
    *args: P.args,
    **options: P.kwargs,
) -> T:
    """Run one operation on a database connection of its own, and return its result.

    Args:
        operation: called with the connection, the schema's name, `args` and `options`.

    Raises:
        OutboxError: as in `database`; and any error of the operation.
    """
    return run_connected(
        settings,
        lambda connection: operation(connection, settings.schema_name, *args, **options),
    )


async def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGTERM and SIGHUP (a closed terminal) cancel it as Ctrl-C does."""
    running = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def warn(message: str) -> None:
    """Print a one-line warning on stderr; stdout is for the result."""
    echo(f"outbox: warning: {one_line(message)}", err=True)


def warn_about_networks(name: str, networks: Iterable[str | Network]) -> None:
    """Warn about allowed networks that expose a cloud metadata service."""
    for warning in network_warnings(name, networks):
        warn(warning)


def note_next_page(rows: RowPage[T], cursor: Callable[[T], object]) -> RowPage[T]:
    """Print on stderr how to get the rows after a page, if there are some; returns the page."""
    if rows.more:
        is_full = rows.cursor is None
        following = shlex.quote(str(cursor(rows[-1]) if is_full else rows.cursor))
        found = "more rows exist" if is_full else "older rows were not searched"
        echo(f"{found}; next page: --after {following}", err=True)
    return rows


def actor() -> str:
    """The actor for journal entries: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "cli"
    return f"{user}@{socket.gethostname()}"


def require_http_url(name: str, text: str) -> None:
    """Check that a URL argument is http or https.

    Raises:
        UsageError: the URL has another scheme; the message names the argument.
    """
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"{name}: {text!r} does not start with http:// or https://")


def duration_s(text: str) -> float:
    """Parse a positive duration such as `90`, `90s`, `10m`, `2h` or `1d` into seconds.

    Raises:
        click.BadParameter: the text is no duration, or zero.
    """
    try:
        seconds = duration.parse(text)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None
    if not seconds:
        raise click.BadParameter(f'"{text}" is not a positive duration')
    return seconds
