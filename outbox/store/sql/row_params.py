"""Rows as one parameter: the literal of an array of a composite type (`$1::attempt_row[]`).

The columns of the frequent rows are declared once, with their types, in schema/0002_relay.sql.
Each rare row is a JSON document instead, whose columns the statement declares (`json_to_record`):
that takes the server longer, but depends on no type of the schema.  They are an array, too,
because the planner expects ten rows of an array and a hundred of `json_to_recordset`, for which
it may prefer to read a whole table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_OPEN, _CLOSE = '"(', ')"'


def composite_array(rows: Iterable[str]) -> str:
    """An array of rows that are composite literals, such as `(1,delivered,)`; empty means NULL."""
    literals = '","'.join(rows)
    return f'{{"{literals}"}}' if literals else "{}"


def composite_number(value: float | None) -> float | str:
    """A number, or NULL, as a field of a row of `composite_array`."""
    return "" if value is None else value


def composite_text(text: str | None) -> str:
    """A text field of a row of `composite_array`, quoted for the row and for the array."""
    if text is None:
        return ""
    quoted = text.replace("\\", "\\\\\\\\").replace('"', r"\"\"")
    return rf"\"{quoted}\""


def number_rows(rows: Iterable[tuple[int | None, ...]]) -> str:
    """An array of rows of numbers."""
    arrays = orjson.dumps(list(rows)).decode()[1:-1].replace("null", "")
    return f"{{{arrays.replace('[', _OPEN).replace(']', _CLOSE)}}}"


def composite_json(value: object) -> str:
    """A JSON value, or NULL, as a field of a row of `composite_array`."""
    return "" if value is None else composite_text(json_text(value))


def distinct_json(values: Sequence[object]) -> tuple[str, str]:
    """JSON values, or NULL, each of which is sent once: `$2::jsonb -> index` is the value.

    Returns:
        An array of the index of each value, and the JSON array of the distinct ones.  Both are
        empty if all are NULL: `unnest` of several arrays fills the shorter ones with NULL.
    """
    if values.count(None) == len(values):
        return "{}", "[]"
    indexes: dict[str, int] = {}
    # A value that is repeated is often the same object, which is encoded once.
    by_id = {
        key: None if value is None else indexes.setdefault(json_text(value), len(indexes))
        for key, value in {id(value): value for value in values}.items()
    }
    array = json_text([by_id[id(value)] for value in values])
    return f"{{{array[1:-1]}}}", f"[{','.join(indexes)}]"


def json_text(value: object) -> str:
    """A value as JSON."""
    return orjson.dumps(value).decode()
