"""Validation errors in JSON terms.

pydantic's messages name Python types, and its locations contain the branches of a union.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import did_you_mean, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outbox_api.route import RequestModel

_JSON_TYPES = {
    "bool": "true or false",
    "datetime": "a time with its zone, such as 2026-01-31T12:00:00Z",
    "dict": "an object",
    "finite": "a number",
    "float": "a number",
    "int": "an integer",
    "model": "an object",
    "string": "a string",
    "time": "an age such as 2h or 3d",
    "timezone": "a time with its zone, such as 2026-01-31T12:00:00Z",
    "tuple": "an array",
}
"""JSON types by the prefix of pydantic's error types."""
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt:g}",
}
_BRANCHES = frozenset(("bool", "datetime", "float", "int", "str", "timedelta"))


def describe_errors(errors: Sequence[Any], model: type[RequestModel], where: str) -> str:
    """Describe the first error in one line, with its field.

    Args:
        errors: pydantic's errors for this model.
        where: the part of the request: "the query" or "the body".
    """
    first = errors[0]
    parts = list(_place(first["loc"]))
    place = ".".join(parts) or where
    match first["type"]:
        case "unknown_field":
            return _unknown_field(first["ctx"]["name"], model, place)
        case "missing":
            return f"{place}: is required"
        case "too_short":
            return f"{place}: has {first['ctx']['actual_length']} items, must have at least one"
        case "too_long":
            context = first["ctx"]
            return (
                f"{place}: has {context['actual_length']} items, at most {context['max_length']} "
                "are allowed in one request"
            )
    # For a union, combine the expectations of all branches.
    same = [each for each in errors if list(_place(each["loc"])) == parts]
    for each in same:
        if each["type"] == "value_error":
            return f"{place}: {each['ctx']['error']}"
    expected = dict.fromkeys(each for error in same for each in _expected(error))
    return f"{place}: must be {' or '.join(expected)}"


def _place(location: Sequence[int | str]) -> Iterator[str]:
    """Field names and indexes of a location, without union branches."""
    return map(str, takewhile(lambda part: not _is_branch(part), location))


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)


def _expected(error: Any) -> list[str]:
    kind: str = error["type"]
    if kind == "literal_error":
        return re.findall(r"'([^']*)'", error["ctx"]["expected"])
    if kind in _BOUNDS:
        return [_BOUNDS[kind].format_map(error["ctx"])]
    return [_JSON_TYPES.get(kind.partition("_")[0], "another type")]


def _unknown_field(name: str, model: type[RequestModel], where: str) -> str:
    known = list(model.model_fields)
    hint = did_you_mean(name, known, f"known: {', '.join(known) or 'none'}")
    return f'{where}: unknown field "{truncate(name)}"; {hint}'
