"""Options of the commands that serve until they are stopped: `outbox relay` and `outbox api`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONS = (
    click.option("--config", metavar="FILE", help="Settings file; default: ./outbox.toml."),
    click.option(
        "--schema",
        "schema_name",
        metavar="NAME",
        help="Schema of the outbox tables; default: relay.",
    ),
    click.option(
        "--health",
        metavar="HOST:PORT",
        help="Serve /healthz, /readyz and /metrics at this address, without authentication.",
    ),
    click.option(
        "--allow-networks",
        metavar="RANGES",
        help="Private networks that endpoints may be in, such as 127.0.0.0/8,10.0.0.0/8.",
    ),
    click.option(
        "--proxy",
        metavar="URL",
        help="Forward proxy for https requests to endpoints; prefer OUTBOX_PROXY, because ps shows "
        "flags.",
    ),
    click.option(
        "--log-format",
        metavar="FORMAT",
        help="json, console, or auto (default): console on a terminal.",
    ),
    click.option(
        "--log-level",
        metavar="LEVEL",
        help="Minimum log level: debug, info (default), warning or error.",
    ),
)


def process_options(*own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add the common options to a command, after its own ones."""

    def decorate(command: Any) -> Any:
        for option in reversed((*own, *_OPTIONS)):
            command = option(command)
        return command

    return decorate
