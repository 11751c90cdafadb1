"""What is wrong in a query or a body, in words of the API's.

pydantic tells of types of Python's, and puts the branches of a union into the place: who
asks has to know neither.
"""

from __future__ import annotations

import difflib
import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outbox.api.route import Model

_WORDS = {
    "bool": "true or false",
    "datetime": "a moment with its zone, such as 2026-01-31T12:00:00Z",
    "dict": "an object",
    "finite": "a number",
    "float": "a number",
    "int": "a whole number",
    "model": "an object",
    "string": "a text",
    "time": "a time ago such as 2h or 3d",
    "timezone": "a moment with its zone, such as 2026-01-31T12:00:00Z",
    "tuple": "a list",
}
"""By what the kinds of pydantic's errors begin with."""
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt:g}",
}
_BRANCHES = frozenset(("bool", "datetime", "float", "int", "str", "timedelta"))


def reason(errors: Sequence[Any], model: type[Model], where: str) -> str:
    """The first mistake in one line, with its place.

    Args:
        errors: what pydantic tells of a value for this model.
        where: what the model is of: the query, the body.
    """
    first = errors[0]
    parts = list(_place(first["loc"]))
    place = ".".join(parts) or where
    match first["type"]:
        case "extra_forbidden":
            # Its own name, which may be called as a branch is: "?filter[type]=a".
            return _unknown(str(first["loc"][-1]), model, where)
        case "missing":
            return f"{place}: is missing"
        case "too_short":
            return f"{place}: has {first['ctx']['actual_length']}, must have at least one"
        case "too_long":
            context = first["ctx"]
            return (
                f"{place}: has {context['actual_length']}, at most {context['max_length']} go in "
                "one request; send them in several"
            )
    # What a union takes, all of its branches together.
    same = [each for each in errors if list(_place(each["loc"])) == parts]
    for each in same:
        if each["type"] == "value_error":
            return f"{place}: {each['ctx']['error']}"
    wanted = dict.fromkeys(each for error in same for each in _wanted(error))
    return f"{place}: must be {' or '.join(wanted)}"


def _place(location: Sequence[int | str]) -> Iterator[str]:
    """Names and numbers, up to what is only a branch of a union."""
    return map(str, takewhile(lambda part: not _is_branch(part), location))


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)


def _wanted(error: Any) -> list[str]:
    """What may stand there."""
    kind: str = error["type"]
    if kind == "literal_error":
        return re.findall(r"'([^']*)'", error["ctx"]["expected"])
    if kind in _BOUNDS:
        return [_BOUNDS[kind].format_map(error["ctx"])]
    return [_WORDS.get(kind.partition("_")[0], "something else")]


def _unknown(name: str, model: type[Model], where: str) -> str:
    known = list(model.model_fields)
    near = model.flags.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), None)
    if near is not None:
        return f'{where}: there is no "{cut(name)}"; did you mean "{near}"?'
    return f'{where}: there is no "{cut(name)}"; it understands {", ".join(known) or "nothing"}'
