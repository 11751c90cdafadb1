"""Rows of queries as dataclasses."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Item = TypeVar("Item")

ID_MAX = 2**63 - 1
"""The largest id in a table, and the largest sequence number."""


class JsonText:
    """JSON of a publisher, which becomes part of an output as it is stored."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonText) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"JsonText({self.text!r})"


def encode_other(value: object) -> object:
    """Encode what `orjson.dumps` does not know: JSON as it is, other values as text."""
    return orjson.Fragment(value.text) if isinstance(value, JsonText) else str(value)


class RowPage(list[Item]):
    """A page of rows, and whether there may be more.

    Args:
        cursor: where the next page begins; None: after the last row.
    """

    def __init__(self, rows: Iterable[Item], *, more: bool, cursor: int | None = None) -> None:
        super().__init__(rows)
        self.more = more
        self.cursor = cursor


def from_row(
    kind: type[T],
    row: Any,
    *,
    parse: Collection[str] = (),
    embed: Collection[str] = (),
    **values: Any,
) -> T:
    """Build a dataclass from the columns that have the names of its fields.

    Args:
        parse: columns of JSON text.
        embed: columns of JSON text from publishers, which become part of an output as they are.
            No parser represents every number and depth that jsonb can have.
        values: fields that are not columns.
    """
    for name in _columns(kind):
        if name not in values:
            value = row[name]
            if name in parse:
                value = parse_json(value)
            elif name in embed:
                value = None if value is None else JsonText(value)
            values[name] = value
    return kind(**values)


@cache
def _columns(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.init)


def parse_id(text: str, least: int = 1) -> int | None:
    """Parse an id; None: the text is not one, or below `least`."""
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= ID_MAX:
        return int(text)
    return None


def parse_json(text: str | None) -> Any:
    """The value of a column of JSON text; None for SQL's NULL."""
    return None if text is None else orjson.loads(text)
