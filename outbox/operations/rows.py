"""Rows of queries as dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

if TYPE_CHECKING:
    from collections.abc import Collection

    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

ID_MAX = 2**63 - 1
"""The largest id in a table, and the largest sequence number."""


def from_row(kind: type[T], row: Any, *, parse: Collection[str] = (), **values: Any) -> T:
    """Build a dataclass from the columns that have the names of its fields.

    Args:
        parse: columns of JSON text.
        values: fields that are not columns.
    """
    for each in fields(kind):
        name = each.name
        if each.init and name not in values:
            values[name] = parse_json(row[name]) if name in parse else row[name]
    return kind(**values)


def parse_json(text: str | None) -> Any:
    """The value of a column of JSON text; None for SQL's NULL."""
    return None if text is None else orjson.loads(text)
