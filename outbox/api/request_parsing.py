"""Reading queries and bodies, and saying where they are wrong."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import orjson
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, WithJsonSchema

from outbox.api.problem import Kind, Problem
from outbox.api.route import LIMIT, LIMIT_MAX, Model
from outbox.api.validation_errors import reason
from outbox.core.model import duration
from outbox.core.model.text import is_text
from outbox.errors import UsageError

if TYPE_CHECKING:
    from aiohttp import web
    from multidict import MultiMapping

BODY_BYTES_MAX = 4 * 1024 * 1024


def _when(value: Any) -> Any:
    """A moment that says its zone, or how long ago: `2026-01-31T12:00:00Z`, `2h`."""
    if not isinstance(value, str):
        # pydantic reads false as no time ago, and so {"until": false} would mean everything.
        raise ValueError("must be a moment with its zone, or a time ago such as 2h, as a text")
    try:
        return timedelta(seconds=duration.parse(value))
    except UsageError:
        pass
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        at = None
    if at is None or at.utcoffset() is None:
        raise ValueError(
            f'"{value[:40]}" is neither a moment with its zone, such as 2026-01-31T12:00:00Z, '
            "nor a time ago such as 2h or 3d"
        )
    return at


def _seconds(value: Any) -> Any:
    """Seconds, as a number or in units: `90`, `"10m"`."""
    if isinstance(value, bool):
        raise ValueError("must be seconds, or a text such as 10m")
    return duration.parse(value) if isinstance(value, str) else value


When = Annotated[
    datetime | timedelta,
    BeforeValidator(_when),
    PlainSerializer(str),
    WithJsonSchema(
        {
            "type": "string",
            "description": "A moment with its zone, such as 2026-01-31T12:00:00Z, or how long "
            "ago: 2h, 3d.",
        }
    ),
]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {"type": ["number", "string"], "description": "Seconds, or a text such as 10m, 2h, 1d."}
    ),
]


def moment(when: datetime | timedelta | None, now: datetime) -> datetime | None:
    """The moment that was meant, by the database's clock."""
    return now - when if isinstance(when, timedelta) else when


class Paging(Model):
    """What every listing understands."""

    limit: int = Field(default=LIMIT, ge=1, le=LIMIT_MAX)
    """At most so many items."""
    after: str | None = None
    """`next` of the page before."""


class NoQuery(Model):
    """A route that understands nothing."""


def read_query(given: MultiMapping[str], model: type[Model]) -> Model:
    """The query of a request.

    Raises:
        Problem: something in it is wrong, or unknown.
    """
    values: dict[str, Any] = {}
    for name in given:
        field = model.model_fields.get(name)
        many = field is not None and get_origin(field.annotation) is tuple
        said = given.getall(name)
        if len(said) > 1 and not many:
            raise Problem(Kind.INVALID, f"{name}: stands there {len(said)} times")
        values[name] = said if many else said[0]
    return hold_to(model, values, "the query")


async def read_body(request: web.Request, model: type[Model], *, required: bool) -> Model:
    """The body of a request, as JSON.

    Raises:
        Problem: it is too large, not JSON, or something in it is wrong.
    """
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise too_large()
    if not request.body_exists and not required:
        return hold_to(model, {}, "the body")
    if request.content_type != "application/json" or "Content-Encoding" in request.headers:
        raise Problem(
            Kind.WRONG_CONTENT_TYPE, "say Content-Type: application/json, and do not compress it"
        )
    raw = await request.read()
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Problem(
            Kind.BAD_REQUEST,
            f"the body is not JSON: line {error.lineno}, column {error.colno}: {error.msg}",
        ) from None
    if not isinstance(values, dict):
        many = model.many if isinstance(values, list) else None
        hint = f'; several go as {{"{many}": [one, another]}}' if many else ""
        raise Problem(Kind.INVALID, f"the body: must be an object{hint}")
    return hold_to(model, values, "the body")


def too_large() -> Problem:
    """A body beyond all bounds."""
    return Problem(Kind.TOO_LARGE, f"a body has at most {BODY_BYTES_MAX} bytes")


def hold_to_text(value: object) -> None:
    """Refuse text that PostgreSQL cannot hold, wherever it stands.

    Raises:
        Problem: there is some.
    """
    if isinstance(value, str):
        if "\0" in value or not is_text(value):
            raise Problem(Kind.BAD_REQUEST, "there is a character that PostgreSQL cannot hold")
    elif isinstance(value, dict):
        for key, each in value.items():
            hold_to_text(key)
            hold_to_text(each)
    elif isinstance(value, list | tuple):
        for each in value:
            hold_to_text(each)


def hold_to(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """Values as a model has them.

    Raises:
        Problem: something is wrong; it says where.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise Problem(Kind.INVALID, reason(found, model, where)) from None
