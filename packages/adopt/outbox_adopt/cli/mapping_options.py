"""The options of a mapping of columns, and its file."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outbox.cli.document import read_document
from outbox.core.model.event import check_content_type
from outbox.core.model.headers import event_header_problem
from outbox.core.model.text import quoted
from outbox.errors import UsageError
from outbox_adopt.mapping import LAYOUTS, parse_mapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_adopt.mapping import SourceMapping

R = TypeVar("R")

_COLUMNS = (
    ("id", "Identifies a row; default: id."),
    ("order_by", "Order in which rows are sent; default: that of --id."),
    ("tenant", "Tenant of the event."),
    ("payload", "jsonb, json, text or bytea; default: payload."),
    ("once", "Idempotency key: of the rows with one value, only the first is published."),
    (
        "sent_column",
        "Shows whether a row was sent: a time, NULL before, or a boolean; or of any type, with "
        "the next two.",
    ),
)
_LISTS = (
    ("type", 'Event type; several columns are joined by ".".'),
    ("key", 'Events with one key stay in order; several columns are joined by ":".'),
)
_PAIRS = {
    "type_names": (
        "--type-name",
        "OLD=NEW",
        "Event type for one value of --type, instead of the converted one.",
    ),
    "headers": ("--header", "NAME=COLUMN", "A header of the event."),
}
_VALUES = (
    ("pending_value", "VALUE", "Value of --sent-column before a row is sent."),
    ("sent_value", "VALUE", "Value of --sent-column afterwards."),
    ("content_type", "TYPE", "Media type of a payload of type bytea."),
    ("publication", "NAME", "A connector reads this publication, as Debezium does."),
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def mapping_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add the options of a mapping; the command receives it as `mapping`."""
    options = [
        *(click.option(_flag(n), n, metavar="COLUMN", help=text) for n, text in _COLUMNS),
        *(click.option(_flag(n), n, metavar=value, help=text) for n, value, text in _VALUES),
        *(
            click.option(_flag(n), n, multiple=True, metavar="COLUMN", help=text)
            for n, text in _LISTS
        ),
        *(
            click.option(flag, n, multiple=True, metavar=value, help=text)
            for n, (flag, value, text) in _PAIRS.items()
        ),
    ]
    names = [*(n for n, *_ in (*_COLUMNS, *_VALUES, *_LISTS)), *_PAIRS, "sent_deleted"]

    @functools.wraps(function)
    def with_mapping(layout: str | None, path: str | None, **arguments: Any) -> R:
        given = {name: arguments.pop(name) for name in names}
        return function(mapping=_mapping(layout, path, given), **arguments)

    for option in (
        click.option(
            "--sent-deleted",
            is_flag=True,
            default=None,
            help="The old poller deletes the rows that it has sent.",
        ),
        *reversed(options),
        click.option(
            "--file",
            "path",
            metavar="FILE",
            help="The mapping as YAML, JSON or TOML; see the example. Options override it.",
        ),
        click.option(
            "--layout",
            type=click.Choice(list(LAYOUTS)),
            help="The columns of a known table. Options and the file override them.",
        ),
    ):
        with_mapping = option(with_mapping)
    return with_mapping


def _mapping(layout: str | None, path: str | None, given: dict[str, Any]) -> SourceMapping:
    """The mapping of a layout, a file and options.

    Raises:
        UsageError: one of them is invalid.
    """
    values = {name: value for name, value in given.items() if value not in (None, ())}
    for name, (flag, form, _) in _PAIRS.items():
        if name in values:
            pairs = [each.rpartition("=") for each in values[name]]
            if not all(left and right for left, _, right in pairs):
                raise UsageError(f"{flag}: write {flag} {form}")
            values[name] = {left: right for left, _, right in pairs}
    prefix = ""
    if path is not None:
        prefix = f"{path}: "
        try:
            document = read_document(path)
        except UsageError as error:
            raise UsageError(f"{prefix}{error}") from None
        if not isinstance(document, dict):
            raise UsageError(f"{prefix}must be a mapping of settings")
        values = {**document, **values}
    try:
        mapping = parse_mapping(values, layout)
        check_content_type(mapping.content_type)
        for name in mapping.headers:
            if problem := event_header_problem(name, ""):
                raise UsageError(f"headers: {quoted(name)} {problem}")
    except UsageError as error:
        raise UsageError(f"{prefix}{error}") from None
    return mapping
