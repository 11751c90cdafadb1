"""Numbers of publishers reach the database as they are, or are refused with what to use instead."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model.event import encode_payload
from outbox.core.model.json_values import decode_json
from outbox.errors import InvalidEvent
from outbox.producers.event import Event, _warn_inexact, encode_event

MANY_DIGITS = "1234567890123456.123456789"


@dataclass
class Money:
    amount: Decimal


class Plan(Enum):
    FREE = Decimal("0.00")


ENCODED: dict[str, tuple[Any, str]] = {
    "Decimal": (Decimal("19.90"), "19.90"),
    "Decimal with an exponent": (Decimal("1E+2"), "1E+2"),
    "in a dataclass": (Money(Decimal("-0.1")), '{"amount":-0.1}'),
    "in an enum": ([Plan.FREE], "[0.00]"),
    "datetime": (datetime(2026, 1, 31, 12, tzinfo=UTC), '"2026-01-31T12:00:00+00:00"'),
    "date": (date(2026, 1, 31), '"2026-01-31"'),
    "UUID": (UUID(int=7), '"00000000-0000-0000-0000-000000000007"'),
    "2^53": (2**53 - 1, "9007199254740991"),
}
INEXACT: dict[str, tuple[Any, str]] = {
    "2^53 + 1": ({"n": 2**53 + 1}, '{"n":9007199254740993}'),
    "2^64 - 1": (2**64 - 1, "18446744073709551615"),
    "2^64": (Decimal(2**64), "18446744073709551616"),
    "many digits": (Decimal(MANY_DIGITS), MANY_DIGITS),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a larger int": ([2**64], "exceeds 64 bits; use a Decimal, or text"),
    "a set": ({1}, "set is not JSON; use text, a list or a dict"),
    "NaN": (Decimal("NaN"), "NaN and infinity are not JSON"),
    "infinity": (float("inf"), "NaN and infinity are not JSON"),
    "beyond a double": (Decimal("2E+308"), "out of the range of a double; use text"),
    "beyond a double, as text": (b"1e309", "not JSON: number is infinity"),
    "309 digits": (b"1" + b"0" * 309, "not JSON: number is infinity"),
    "too small": (Decimal("1E-16384"), "out of the range"),
    "NUL": ("\0", "cannot store a NUL"),
    "an escaped NUL": (b'"\\u0000"', "cannot store a NUL"),
    "a lone surrogate": ("\ud800", "not JSON: str is not valid UTF-8"),
    "an escaped surrogate": (b'"\\ud800"', "not JSON: no low surrogate"),
    "depth": (b"[" * 1025 + b"]" * 1025, "depth limit exceeded"),
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_values_are_encoded_exactly(subtests: pytest.Subtests) -> None:
    for exact, cases in ((True, ENCODED), (False, INEXACT)):
        for name, (value, text) in cases.items():
            with subtests.test(name):
                reported: list[None] = []
                encoded = encode_payload(value, lambda to=reported: to.append(None))
                assert encoded.decode() == text
                assert bool(reported) is not exact


def test_publishing_warns_once_of_numbers_that_receivers_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_inexact.cache_clear()
    for payload in (2**53 - 1, Decimal("0.1"), "9007199254740993"):
        encode_event(Event("a", payload), payload)
    assert not caplog.records
    for payload in (2**53, [Decimal(MANY_DIGITS)]):
        encode_event(Event("a", payload), payload)
    (record,) = caplog.records
    assert "publish it as text" in record.getMessage()


def test_what_cannot_be_represented_is_refused(subtests: pytest.Subtests) -> None:
    for name, (value, reason) in (REFUSED | {"a deep list": (nested(300), "not JSON")}).items():
        with subtests.test(name), pytest.raises(InvalidEvent, match=reason):
            encode_payload(value)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value="-1e300", max_value="1e300"))
def test_every_number_is_decoded_exactly(number: Decimal) -> None:
    decoded = decode_json(f'{{"a": [{number}]}}'.encode())["a"][0]
    # A float stands for the number that its shortest text is.
    assert Decimal(repr(decoded) if isinstance(decoded, float) else decoded) == number


def test_decoding_refuses_what_is_not_json(subtests: pytest.Subtests) -> None:
    for text in (b"NaN", b"[1e400]", b"1" * 400, b"[" * 2000 + b"]" * 2000, b"[9.9e9," + b"["):
        with subtests.test(text[:20]), pytest.raises(orjson.JSONDecodeError):
            decode_json(text)
    deep = b"[" * 1020 + b"9" * 30 + b"]" * 1020
    with pytest.raises(orjson.JSONDecodeError):
        decode_json(deep)
    assert decode_json(b'{"a": "x,1e5", "b": 1e5}') == {"a": "x,1e5", "b": 100_000.0}


@pytest.mark.parametrize("number", ["1e-99999999999999999999", "0e99999999999999999999"])
def test_an_exponent_of_twenty_digits_is_an_error_of_the_text(number: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        decode_json(b'{"n": %s, "m": 1234567890123456789012}' % number.encode())
