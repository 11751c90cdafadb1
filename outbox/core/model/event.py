"""What an event may be: the limits of the contract, told before the database.

The same limits are CHECKs of the table `outbox`, because a plain INSERT is a
producer too.  Told here, they cost no round trip and leave the caller's
transaction alive.

    type        dotted segments of letters, digits and _; 255 bytes
    key         1 to 512 bytes
    tenant      1 to 255 bytes
    once        1 to 512 bytes; once_for: more than 0, at most a century
    headers     names and values that HTTP can carry; 8192 bytes as JSON, and (told here
                alone) 64 of them
    payload     JSON that jsonb can hold; the size is a setting of the database
    deliver_at  a time that says its zone
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

from outbox.core.model.headers import WIRE_COUNT_MAX, event_header_problem, same_name
from outbox.core.model.pattern import RESERVED_PREFIX, TYPE_BYTES_MAX
from outbox.errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY_BYTES_MAX = 512
TENANT_BYTES_MAX = 255
ONCE_BYTES_MAX = 512
HEADERS_BYTES_MAX = 8192
CENTURY_S = 100 * 365.25 * 86400

_TYPE = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
# A \u0000 whose backslash is not itself escaped.
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def check_type(value: object) -> str:
    """The type itself.

    Raises:
        InvalidEvent: it is not one, too long, or reserved.
    """
    text = _text("type", value, TYPE_BYTES_MAX)
    if not _TYPE.fullmatch(text):
        raise InvalidEvent(
            "type", f"{_short(text)} is not dot-separated segments of letters, digits and _"
        )
    if text.startswith(RESERVED_PREFIX):
        raise InvalidEvent("type", f'"{RESERVED_PREFIX}" is reserved for operational events')
    return text


def check_text(field: str, value: object, bytes_max: int) -> str | None:
    """A key, tenant or once key itself; None stays None.

    Raises:
        InvalidEvent: it is no text, empty or too long.
    """
    return None if value is None else _text(field, value, bytes_max)


def encode_headers(
    headers: Mapping[str, str] | None,
    problem_of: Callable[[str, object], str | None] = event_header_problem,
) -> str | None:
    """Headers as JSON text; None when there are none.

    Args:
        problem_of: why one cannot go along.

    Raises:
        InvalidEvent: HTTP cannot carry one of them, one is reserved, two
            differ in case only, or all together are too long.
    """
    if not headers:
        return None
    seen: set[str] = set()
    for name, value in headers.items():
        if not isinstance(name, str):
            raise InvalidEvent("headers", f"a name is {type(name).__name__}, not text")
        problem = problem_of(name, value)
        if problem is None and same_name(name) in seen:
            problem = "stands there twice"
        if problem is not None:
            raise InvalidEvent("headers", f"{_short(name)} {problem}")
        seen.add(same_name(name))
    if len(seen) > WIRE_COUNT_MAX:
        raise InvalidEvent("headers", f"{len(seen)} of them, the limit is {WIRE_COUNT_MAX}")
    # Written as jsonb writes itself, so that the size is the database's.
    text = json.dumps(dict(headers), ensure_ascii=False)
    if len(text) > HEADERS_BYTES_MAX:
        raise InvalidEvent(
            "headers", f"{len(text)} bytes as JSON, the limit is {HEADERS_BYTES_MAX}"
        )
    return text


def expires_in_s(value: timedelta | float | None) -> float | None:
    """Seconds from now to the end of the event's worth.

    Raises:
        InvalidEvent: it is not a duration, not positive, or beyond a century.
    """
    return _seconds("expires_in", value)


def once_for_s(value: timedelta | float | None, once: str | None) -> float | None:
    """Seconds for which nobody else gets a once key; None: as long as usual.

    Raises:
        InvalidEvent: it is not a duration, not positive, beyond a century, or there
            is no once key.
    """
    if value is not None and once is None:
        raise InvalidEvent("once_for", "goes with once")
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
    """When an event is to enter the outbox, as text that no session's zone changes.

    Raises:
        InvalidEvent: it is no time, or one that does not say its zone.
    """
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidEvent("deliver_at", f"{type(value).__name__} is not a datetime")
    if value.utcoffset() is None:
        raise InvalidEvent("deliver_at", "has no time zone; say datetime.now(UTC) + …")
    try:
        return value.astimezone(UTC).isoformat()
    except OverflowError:
        raise InvalidEvent("deliver_at", "lies beyond all calendars") from None


def encode_payload(value: Any) -> str:
    """A payload as JSON text.

    Bytes are taken as JSON that was written already, everything else is
    written: dicts with text keys, lists, text, numbers of 64 bits, booleans,
    None, and what orjson knows beside (datetime, UUID, dataclasses, enums).

    Raises:
        InvalidEvent: it is not JSON, or JSON that jsonb cannot hold.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise InvalidEvent("payload", f"not JSON: {error}") from None
    else:
        try:
            raw = orjson.dumps(value)
        except TypeError as error:
            raise InvalidEvent("payload", f"not JSON: {error}") from None
        # orjson writes NaN as null, which is another value.
        if b"null" in raw and _has_nan(value):
            raise InvalidEvent("payload", "NaN and infinity are not JSON; write null or a text")
    text = raw.decode()
    if "\\u0000" in text and _NUL_ESCAPE.search(text):
        raise InvalidEvent("payload", "PostgreSQL cannot hold a NUL character (\\u0000) in text")
    return text


def _text(field: str, value: object, bytes_max: int) -> str:
    if not isinstance(value, str):
        raise InvalidEvent(field, f"{type(value).__name__} is not text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidEvent(field, "not Unicode text: it has half of a surrogate pair") from None
    if "\0" in value:
        raise InvalidEvent(field, "PostgreSQL cannot hold a NUL character")
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
