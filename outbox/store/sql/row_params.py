"""Rows as one parameter: the literal of an array of a composite type (`$1::attempt_run_row[]`).

The columns of the frequent rows are declared once, with their types, in schema/0002_relay.sql and
schema/0024_runs.sql.  Each rare row is a JSON document instead, whose columns the statement
declares (`json_to_record`): that takes the server longer, but depends on no type of the schema.
They are an array, too, because the planner expects ten rows of an array and a hundred of
`json_to_recordset`, for which it may prefer to read a whole table.
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


def composite_numbers(values: Sequence[float]) -> str:
    """An array of numbers as a field of a row of `composite_array`; NULL if there is only one."""
    return rf"\"{{{json_text(values)[1:-1]}}}\"" if len(values) > 1 else ""


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


def json_text(value: object) -> str:
    """A value as JSON."""
    return orjson.dumps(value).decode()
