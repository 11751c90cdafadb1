"""Event validation: the limits of the contract, checked before the database.

The table `outbox` has the same limits as CHECK constraints, because a plain INSERT is a
producer as well.  Checking here costs no round trip and does not abort the caller's
transaction.

    type        dotted segments of letters, digits, _ and -, not beginning with -; 255 bytes
    key         1 to 512 bytes
    tenant      1 to 255 bytes
    once        1 to 512 bytes; once_for: more than 0, at most a century
    headers     names and values that are valid in HTTP; 8192 bytes as JSON, and (checked
                only here) at most 64
    payload     JSON that is valid as jsonb, or bytes with a content type; 256 KiB at first: the
                SQL function `payload_bytes_max()` returns the limit, which
                `outbox migrate --payload-bytes-max` sets
    content_type   a media type, not that of JSON or of a CloudEvent; 255 bytes
    deliver_at  a time with a time zone
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.headers import WIRE_COUNT_MAX, event_header_problem, normalize_name
from outbox.core.model.json_values import encode_json
from outbox.core.model.message_format import CLOUDEVENTS_TYPES, JSON_TYPE
from outbox.core.model.pattern import RESERVED_PREFIX, TYPE, TYPE_BYTES_MAX
from outbox.errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY_BYTES_MAX = 512
TENANT_BYTES_MAX = 255
DOT_SEGMENTS = (".", "..")
"""Clients remove them from the path of a URL (RFC 3986, 5.2.4)."""
NOT_ADDRESSABLE = '"." and ".." are parts of paths, so no URL could name it'
ONCE_BYTES_MAX = 512
HEADERS_BYTES_MAX = 8192
CONTENT_TYPE_BYTES_MAX = 255
EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)
"""The range of an event's times: a day less than Python's, which leaves room for time zones."""
CENTURY_S = 100 * 365.25 * 86400

_NAME = r"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
# RFC 9110, section 8.3.1.
_CONTENT_TYPE = re.compile(rf"""{_NAME}/{_NAME}(?: *; *{_NAME}=(?:{_NAME}|"[] !#-[^-~]*"))*""")
# A \u0000 whose backslash is not itself escaped.
_NUL_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def check_type(value: object) -> str:
    """Validate and return an event type.

    Raises:
        InvalidEvent: the type is malformed, too long or reserved.
    """
    text = _text("type", value, TYPE_BYTES_MAX)
    if not TYPE.fullmatch(text):
        raise InvalidEvent(
            "type",
            f"{_short(text)} is not dot-separated segments of letters, digits, _ and -, which do "
            "not begin with -",
        )
    if text.startswith(RESERVED_PREFIX):
        raise InvalidEvent("type", f'"{RESERVED_PREFIX}" is reserved for operational events')
    return text


def check_text(field: str, value: object, bytes_max: int) -> str | None:
    """Validate and return a key, tenant or idempotency key; None is valid.

    Raises:
        InvalidEvent: the value is not text, empty or too long.
    """
    return None if value is None else _text(field, value, bytes_max)


def check_tenant(value: object) -> str | None:
    """Validate and return a tenant, which the API has in paths; None is valid.

    Raises:
        InvalidEvent: the value is not text, empty, too long or a part of paths.
    """
    text = check_text("tenant", value, TENANT_BYTES_MAX)
    if text in DOT_SEGMENTS:
        raise InvalidEvent("tenant", NOT_ADDRESSABLE)
    return text


def encode_headers(
    headers: Mapping[str, str] | None,
    problem_of: Callable[[str, object], str | None] = event_header_problem,
) -> str | None:
    """Validate headers and return them as JSON text; None if there are none.

    Args:
        problem_of: returns why a header is invalid, or None.

    Raises:
        InvalidEvent: a header is invalid or reserved, two names differ only in case, or the
            headers are too many or too long.
    """
    if not headers:
        return None
    seen: set[str] = set()
    for name, value in headers.items():
        if not isinstance(name, str):
            raise InvalidEvent("headers", f"a name is {type(name).__name__}, not text")
        problem = problem_of(name, value)
        if problem is None and normalize_name(name) in seen:
            problem = "occurs twice"
        if problem is not None:
            raise InvalidEvent("headers", f"{_short(name)} {problem}")
        seen.add(normalize_name(name))
    if len(seen) > WIRE_COUNT_MAX:
        raise InvalidEvent("headers", f"{len(seen)} headers, the limit is {WIRE_COUNT_MAX}")
    # The text format of jsonb, so that the size is the one that the database checks.
    text = json.dumps(dict(headers), ensure_ascii=False)
    if len(text) > HEADERS_BYTES_MAX:
        raise InvalidEvent(
            "headers", f"{len(text)} bytes as JSON, the limit is {HEADERS_BYTES_MAX}"
        )
    return text


def expires_in_s(value: timedelta | float | None) -> float | None:
    """Validate the time to the event's expiry and return it in seconds.

    Raises:
        InvalidEvent: the value is not a duration, not positive, or longer than a century.
    """
    return _seconds("expires_in", value)


def once_for_s(value: timedelta | float | None, once: str | None) -> float | None:
    """Validate the lifetime of an idempotency key and return it in seconds; None: the default.

    Raises:
        InvalidEvent: the value is not a duration, not positive, longer than a century, or
            there is no idempotency key.
    """
    if value is not None and once is None:
        raise InvalidEvent("once_for", "requires once")
    return _seconds("once_for", value)


def _seconds(field: str, value: timedelta | float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise InvalidEvent(field, f"{type(value).__name__} is neither timedelta nor seconds")
    if not 0 < seconds <= CENTURY_S:
        raise InvalidEvent(field, f"{seconds:g} s is not between 0 and a century")
    return seconds


def deliver_at(value: datetime | None) -> str | None:
    """Validate the delivery time and return it as text in UTC, independent of the session.

    Raises:
        InvalidEvent: the value is not a datetime or has no time zone.
    """
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidEvent("deliver_at", f"{type(value).__name__} is not a datetime")
    if value.utcoffset() is None:
        raise InvalidEvent("deliver_at", "has no time zone; use datetime.now(UTC) + …")
    if value > LATEST:
        raise InvalidEvent("deliver_at", f"is later than {LATEST.date()}")
    try:
        return value.astimezone(UTC).isoformat()
    except OverflowError:
        raise InvalidEvent("deliver_at", "is out of range in UTC") from None


def check_content_type(value: object) -> str | None:
    """Validate and return the content type of a payload; None: it is JSON.

    Raises:
        InvalidEvent: it is malformed, too long, or that of JSON or of a CloudEvent.
    """
    if value is None:
        return None
    text = _text("content_type", value, CONTENT_TYPE_BYTES_MAX)
    if not _CONTENT_TYPE.fullmatch(text):
        raise InvalidEvent("content_type", f"{_short(text)} is not a media type such as image/png")
    media_type = text.partition(";")[0].rstrip().lower()
    if media_type == JSON_TYPE:
        raise InvalidEvent(
            "content_type",
            f"{JSON_TYPE} is what a payload without content_type has; its bytes are then "
            "those that PostgreSQL stores as jsonb",
        )
    if media_type.startswith(CLOUDEVENTS_TYPES):
        # Libraries read the body as the event, with its id, and not the signed headers.
        raise InvalidEvent("content_type", f"{_short(text)} is that of a whole CloudEvent")
    return text


def check_body(value: object) -> bytes:
    """Validate and return a payload that is not JSON.

    Raises:
        InvalidEvent: it is not bytes.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        kind = type(value).__name__
        raise InvalidEvent("payload", f"with a content_type it must be bytes, not {kind}")
    return bytes(value)


def encode_payload(value: Any, on_inexact: Callable[[], object] = lambda: None) -> bytes:
    """Encode a payload as JSON text in UTF-8.

    Bytes are used as JSON text.  Other values are encoded by orjson: dicts with text keys,
    lists, text, 64-bit numbers, booleans, None, datetime, UUID, dataclasses and enums; and
    Decimal, as an exact number.

    Args:
        on_inexact: called for a number, unless in bytes, that many receivers round.

    Raises:
        InvalidEvent: the value is not JSON, or not valid as jsonb.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise InvalidEvent(
                "payload", f"not JSON: {error}; other bytes need a content_type"
            ) from None
    else:
        try:
            raw = encode_json(value, on_inexact)
        except TypeError as error:
            raise InvalidEvent("payload", f"not JSON: {error}") from None
        # orjson encodes NaN as null, which would change the value.
        if b"null" in raw and _has_nan(value):
            raise InvalidEvent("payload", "NaN and infinity are not JSON; use null or text")
    if b"\\u0000" in raw and _NUL_ESCAPE.search(raw):
        raise InvalidEvent("payload", "PostgreSQL cannot store a NUL character (\\u0000) in text")
    return raw


def _text(field: str, value: object, bytes_max: int) -> str:
    if not isinstance(value, str):
        raise InvalidEvent(field, f"{type(value).__name__} is not text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidEvent(field, "not Unicode text: it has a lone surrogate") from None
    if "\0" in value:
        raise InvalidEvent(field, "PostgreSQL cannot store a NUL character")
    if not 1 <= size <= bytes_max:
        raise InvalidEvent(field, f"{size} bytes, must be 1 to {bytes_max}")
    return value


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_nan, value))
    if isinstance(value, Enum):
        return _has_nan(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return _has_nan(asdict(value))
    return False


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
