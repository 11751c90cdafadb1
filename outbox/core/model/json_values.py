"""JSON without loss: values of publishers as text, and bodies of requests as values.

orjson knows numbers of 64 bits.  A `Decimal` is written as the number that it is, and a number that
neither `int` of 64 bits nor `float` can represent is read as a `Decimal`.  The range is that of a
double, as of most parsers (RFC 8259, section 6).
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

SCALE_MAX = 16383
"""Digits behind the decimal point of PostgreSQL's numeric."""
_CLASS_OF = dict.fromkeys(b"0123456789.", ord("0")) | {
    **dict.fromkeys(b"eE", ord("e")),
    ord("-"): ord("-"),
}
NUMBER_CLASSES = bytes.maketrans(
    bytes(range(256)),
    bytes(_CLASS_OF.get(byte, ord(" ")) for byte in range(256)),
)
"""Classes of bytes in numbers, for `bytes.translate`: searched at gigabytes per second, which a
regular expression is not."""
LONG_NUMBER, SMALL_NUMBER = b"0" * 16, b"e-000"
"""Parts, by `NUMBER_CLASSES`, of numbers that a float may not hold: it holds any number of 15
digits with an exponent of two.  A text in a string may have them, too."""


def encode_json(value: Any, on_inexact: Callable[[], object], *, sort_keys: bool = False) -> bytes:
    """Encode a value as JSON text in UTF-8.

    Args:
        on_inexact: called if there is a number that receivers round which read numbers as doubles,
            such as those in JavaScript.
        sort_keys: write the members of objects in the order of their names.

    Raises:
        TypeError: the value is not JSON; says what to use instead.
    """
    option = orjson.OPT_SORT_KEYS if sort_keys else 0

    def encode_other(other: Any) -> orjson.Fragment:
        if not isinstance(other, Decimal):
            raise TypeError(f"{type(other).__name__} is not JSON; use text, a list or a dict")
        number = _decimal_text(other)
        if Decimal(repr(float(other))) != other:
            on_inexact()
        return orjson.Fragment(number)

    try:
        return orjson.dumps(value, encode_other, option | orjson.OPT_STRICT_INTEGER)
    except TypeError as error:
        if "53-bit" not in str(error):
            raise _reason(error) from None
    on_inexact()
    try:
        return orjson.dumps(value, encode_other, option)
    except TypeError as error:
        raise _reason(error) from None


def decode_json(raw: bytes | bytearray) -> Any:
    """Decode JSON text; every number is exact.

    Raises:
        orjson.JSONDecodeError: it is not JSON, or a number or the depth is beyond the limits.
    """
    value = orjson.loads(raw)
    classes = raw.translate(NUMBER_CLASSES)
    if LONG_NUMBER not in classes and SMALL_NUMBER not in classes:
        return value
    try:
        return json.loads(raw, parse_int=_integer, parse_float=_number)
    except RecursionError:
        raise orjson.JSONDecodeError("depth limit exceeded", "", 0) from None
    except InvalidOperation:
        raise orjson.JSONDecodeError("number out of range", "", 0) from None


def _reason(error: TypeError) -> TypeError:
    if isinstance(error.__cause__, TypeError):
        return error.__cause__
    if "64-bit" in str(error):
        return TypeError("an integer exceeds 64 bits; use a Decimal, or text")
    return error


def _decimal_text(value: Decimal) -> str:
    if not value.is_finite():
        raise TypeError("NaN and infinity are not JSON; use null or text")
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    if not math.isfinite(float(value)) or exponent < -SCALE_MAX:
        raise TypeError("a Decimal is out of the range of a double; use text")
    return str(value)


def _integer(text: str) -> int | Decimal:
    number = int(text)
    return number if -(2**63) <= number < 2**64 else Decimal(text)


def _number(text: str) -> float | Decimal:
    number, exact = float(text), Decimal(text)
    return number if Decimal(repr(number)) == exact else exact
