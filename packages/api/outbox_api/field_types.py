"""Types of text fields in requests, which say in the OpenAPI document what the operations accept.

The operations check the text, with a sentence that names the problem.  They count bytes in UTF-8,
which JSON Schema cannot; a text has at most as many characters.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from outbox.core.model import api_token, event, pattern, secret_text
from outbox.core.schedules import schedule

_TYPE = f"^(?!{re.escape(pattern.RESERVED_PREFIX)})(?:{pattern.TYPE.pattern})$"
_SEGMENT = r"(?:\*|[A-Za-z0-9_][A-Za-z0-9_-]*)"
TYPE_PATTERN = rf"^(?:\*\*|{_SEGMENT}(?:\.{_SEGMENT})*(?:\.\*\*)?)$"
"""A pattern of types, as `pattern.parse` takes it."""
_NAME = "[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_MEDIA_TYPE = f"^{_NAME}/{_NAME}(?: *;.*)?$"
"""The operations check its parameters, too, by an expression that JavaScript reads otherwise."""
STORABLE = "^[^\\u0000]*$"
"""Text that PostgreSQL can store."""


def text_schema(chars_max: int | None = None, form: re.Pattern[str] | str = STORABLE) -> Any:
    """JSON schema of a text that is not empty."""
    if not isinstance(form, str):
        form = f"^(?:{form.pattern})$"
    return {"type": "string", "minLength": 1, "pattern": form} | (
        {"maxLength": chars_max} if chars_max else {}
    )


def _text(chars_max: int | None = None, form: re.Pattern[str] | str = STORABLE) -> Any:
    return Field(json_schema_extra=text_schema(chars_max, form))


Text: TypeAlias = Annotated[str, Field(json_schema_extra={"pattern": STORABLE})]
"""What is compared with what exists."""
Name: TypeAlias = Annotated[str, _text()]
"""The name of what exists; the name of another thing is not found."""
EventType: TypeAlias = Annotated[str, _text(pattern.TYPE_BYTES_MAX, _TYPE)]
TypePattern: TypeAlias = Annotated[str, _text(pattern.TYPE_BYTES_MAX, TYPE_PATTERN)]
OrderingKey: TypeAlias = Annotated[str, _text(event.KEY_BYTES_MAX)]
Tenant: TypeAlias = Annotated[str, _text(event.TENANT_BYTES_MAX)]
OnceKey: TypeAlias = Annotated[str, _text(event.ONCE_BYTES_MAX)]
ContentType: TypeAlias = Annotated[str, _text(event.CONTENT_TYPE_BYTES_MAX, _MEDIA_TYPE)]
SecretText: TypeAlias = Annotated[str, _text(secret_text.SECRET_TEXT_BYTES_MAX)]
TokenName: TypeAlias = Annotated[str, _text(form=api_token.TOKEN_NAME)]
ScheduleName: TypeAlias = Annotated[str, _text(form=schedule.SCHEDULE_NAME)]
