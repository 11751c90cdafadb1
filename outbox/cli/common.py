"""What all commands share: options, the connection, the actor's name."""

from __future__ import annotations

import asyncio
import functools
import getpass
import shlex
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outbox.config import Settings, load
from outbox.core.model import duration
from outbox.core.model.cloud_metadata_ranges import exposing
from outbox.core.model.text import one_line
from outbox.errors import UsageError
from outbox.store.connection import dsn
from outbox.store.connection.connect import connect
from outbox.store.connection.migrate import require_current

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
    from ipaddress import IPv4Network, IPv6Network

    from asyncpg import Connection

    Network = IPv4Network | IPv6Network

T = TypeVar("T")

LIMIT_MAX = 10_000
CLOSE_TIMEOUT_S = 2.0

json_option = click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
limit_option = click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=100,
    show_default=True,
    help="At most so many rows.",
)


def settings_options(command: Callable[..., T]) -> Callable[..., T]:
    """The options that every command has; it gets `settings` for them."""

    @functools.wraps(command)
    def with_settings(
        dsn: str | None, schema: str | None, config: str | None, **arguments: Any
    ) -> T:
        flags = {"dsn": dsn, "schema_name": schema}
        return command(settings=load(flags, config=config), **arguments)

    for option in (
        click.option("--config", metavar="FILE", help="Settings; default: ./outbox.toml."),
        click.option("--schema", metavar="NAME", help="Schema of the outbox; default: relay."),
        click.option(
            "--dsn", metavar="DSN", help="The database; better set as OUTBOX_DSN, which ps hides."
        ),
    ):
        with_settings = option(with_settings)
    return with_settings


@asynccontextmanager
async def database(settings: Settings, *, current: bool = True) -> AsyncIterator[Connection[Any]]:
    """A connection for one command.

    Args:
        current: hold the schema to this version first.  Not for those who only
            publish: their role cannot see the history.

    Raises:
        OutboxError: everything that `connect` and `require_current` raise.
    """
    address = dsn.of(settings)
    for warning in address.warnings:
        warn(warning)
    connection = await connect(
        address,
        schema=settings.schema_name,
        application_name="outbox-cli",
        pooled=settings.pooled,
    )
    try:
        if current:
            await require_current(connection, settings.schema_name)
        yield connection
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    finally:
        # After a failure or Ctrl-C nobody waits for a server's goodbye.
        connection.terminate()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine to its end."""
    return asyncio.run(main)


async def until_told(work: Coroutine[Any, Any, T]) -> T:
    """Run it; a closed terminal or SIGTERM takes it down as Ctrl-C does."""
    running = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def warn(message: str) -> None:
    """One line on stderr; stdout belongs to the answer."""
    click.echo(f"outbox: warning: {one_line(message)}", err=True)


def warn_of_networks(name: str, networks: Iterable[str | Network]) -> None:
    """Say on stderr which networks that are opened lead to a metadata service."""
    for why in exposing(networks):
        warn(f"{name}: {why}; open narrower ranges")


def tell_more(last: object) -> None:
    """Say on stderr that --limit cut something off, and how to go on."""
    click.echo(f"there are more; go on with: --after {shlex.quote(str(last))}", err=True)


def actor() -> str:
    """Who does this, for the journal: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "cli"
    return f"{user}@{socket.gethostname()}"


def require_http_url(name: str, text: str) -> None:
    """Refuse what is no URL to be asked, in the name of its argument.

    Raises:
        UsageError: it is neither http nor https.
    """
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"{name}: {text!r} does not begin with http:// or https://")


def duration_s(text: str) -> float:
    """Seconds of a positive time: `90`, `90s`, `10m`, `2h`, `1d`.

    Raises:
        click.BadParameter: it is none.
    """
    try:
        seconds = duration.parse(text)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None
    if not seconds:
        raise click.BadParameter(f'"{text}" is not a time to wait')
    return seconds
