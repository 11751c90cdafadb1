"""Parse and validate queries; validate bodies."""

from __future__ import annotations

from base64 import b64decode
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, get_origin

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, WithJsonSchema

from outbox.core.model import duration
from outbox.core.model.text import is_text
from outbox.errors import UsageError
from outbox_api.field_types import Text
from outbox_api.limits import LIMIT, LIMIT_MAX
from outbox_api.problem import NOT_STORABLE, Problem, ProblemKind
from outbox_api.route import RequestModel
from outbox_api.validation_errors import describe_errors

if TYPE_CHECKING:
    from multidict import MultiMapping


def _parse_time(value: Any) -> Any:
    """Parse a time with its zone; pydantic would take a number for seconds since 1970."""
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        at = None
    if at is None or at.utcoffset() is None:
        raise ValueError("must be a time with its zone, such as 2026-01-31T12:00:00Z")
    return at


def _parse_time_or_age(value: Any) -> Any:
    """Parse a time with its zone or an age: `2026-01-31T12:00:00Z`, `2h`."""
    if not isinstance(value, str):
        # pydantic coerces false to timedelta(0), so {"until": false} would select everything.
        raise ValueError("must be a string: a time with its zone, or an age such as 2h")
    try:
        return timedelta(seconds=duration.parse(value))
    except UsageError:
        pass
    try:
        return _parse_time(value)
    except ValueError:
        raise ValueError(
            f'"{value[:40]}" is neither a time with its zone, such as 2026-01-31T12:00:00Z, '
            "nor an age such as 2h or 3d"
        ) from None


def _parse_seconds(value: Any) -> Any:
    """Parse seconds, as a number or with a unit: `90`, `"10m"`."""
    if isinstance(value, bool):
        raise ValueError("must be a number of seconds, or a string such as 10m")
    return duration.parse(value) if isinstance(value, str) else value


_AGE = {"type": "string", "pattern": f"^{duration.TEXT.pattern}$"}
_TIME = {"type": "string", "format": "date-time"}
Time = Annotated[datetime, BeforeValidator(_parse_time), WithJsonSchema(_TIME)]
"""A time with its zone."""
TimeOrAge = Annotated[
    datetime | timedelta,
    BeforeValidator(_parse_time_or_age),
    PlainSerializer(str),
    WithJsonSchema(
        {
            "anyOf": [_TIME, _AGE],
            "description": "A time with its zone, such as 2026-01-31T12:00:00Z, or an age: 2h, 3d.",
        }
    ),
]


def up_to(maximum_s: float, **bounds: float) -> WithJsonSchema:
    """JSON schema of seconds with bounds, which the operations check; above 0 unless given."""
    number = {"type": "number", **(bounds or {"exclusiveMinimum": 0}), "maximum": maximum_s}
    text = "Seconds, or a string such as 10m, 2h, 1d."
    return WithJsonSchema({"anyOf": [number, _AGE], "description": text})


Seconds = Annotated[float, BeforeValidator(_parse_seconds), up_to(duration.MAX_S)]


def _parse_base64(value: Any) -> bytes:
    try:
        return b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise ValueError("must be a string in Base64") from None


Base64 = Annotated[
    bytes,
    BeforeValidator(_parse_base64),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class Paging(RequestModel):
    """Query of all paginated listings."""

    limit: int = Field(default=LIMIT, ge=1, le=LIMIT_MAX)
    """Maximum number of items.  A page may have fewer and a `next`: it ends after 1 MiB."""
    after: Text | None = None
    """Cursor: `next` of the previous page."""


class IdPaging(Paging):
    """Query of listings in the order of ids."""

    after: Annotated[str, Field(json_schema_extra={"pattern": "^[0-9]+$"})] | None = None
    """Cursor: `next` of the previous page."""


def read_query(given: MultiMapping[str], model: type[RequestModel]) -> RequestModel:
    """Parse and validate a query string.

    Raises:
        Problem: a parameter is unknown or invalid.
    """
    values: dict[str, Any] = {}
    for name in given:
        field = model.model_fields.get(name)
        is_list = field is not None and get_origin(field.annotation) is tuple
        values_given = given.getall(name)
        if len(values_given) > 1 and not is_list:
            raise Problem(
                ProblemKind.INVALID, f"{name}: given {len(values_given)} times; give it once"
            )
        values[name] = values_given if is_list else values_given[0]
    return validate(model, values, "the query")


def require_storable_text(value: object) -> None:
    """Reject text that PostgreSQL cannot store (NUL, lone surrogates), in nested values as well.

    Raises:
        Problem: a string contains such a character.
    """
    if isinstance(value, str):
        if "\0" in value or not is_text(value):
            raise Problem(ProblemKind.BAD_REQUEST, NOT_STORABLE)
    elif isinstance(value, dict):
        for key, each in value.items():
            require_storable_text(key)
            require_storable_text(each)
    elif isinstance(value, list | tuple):
        for each in value:
            require_storable_text(each)


def validate(model: type[RequestModel], values: dict[str, Any], where: str) -> RequestModel:
    """Validate values against a model.

    Raises:
        Problem: a value is invalid; the detail names the field.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise Problem(ProblemKind.INVALID, describe_errors(found, model, where)) from None
