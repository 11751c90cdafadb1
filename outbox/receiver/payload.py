"""Payloads of messages: the exact text, and a value in which no number is rounded.

A request is parsed with orjson, which makes floats of numbers: integers beyond 64 bits and decimals
of more than 15 digits may be rounded.  PostgreSQL's `jsonb` preserves both.  So a payload that may
have such numbers is parsed again when it is read, with integers of any size.  What a float cannot
hold is refused; `parse=` reads it.

| text | `data` | with `parse=` |
|---|---|---|
| integer up to 4,300 digits | exact: `int`, or `float` if a float has this value | its own |
| decimal that a float holds | `float` | its own |
| any other number | `UnreadablePayload` | its own |
| more than 1,024 levels | `UnreadablePayload` | its own |

A float holds a decimal that is its shortest form, or its form with 17 digits, in which programs in
C, PHP and .NET write floats.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.json_values import LONG_NUMBER, NUMBER_CLASSES, SMALL_NUMBER
from outbox.receiver.errors import UnreadablePayload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Parse: TypeAlias = Callable[[str], Any]
    Span: TypeAlias = tuple[int, int]

LEVELS_MAX = 1024
"""Limit of orjson for the nesting of arrays and objects."""
_SHOWN_CHARACTERS = 40
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:"]', re.DOTALL)
_NESTED_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]', re.DOTALL)
_SCANNER = json.JSONDecoder(parse_float=str, parse_int=str)
"""Finds the end of a value, and converts no number."""
_SPACES = re.compile(rb"[ \t\r\n]*")
_NUMBER_AT = re.compile(rb"[0-9.eE+-]+")
_NUMBER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?[0-9][0-9.eE+-]*)', re.DOTALL)
_WAY_ON = (
    "give the receiver parse=, such as functools.partial(json.loads, parse_float=decimal.Decimal), "
    "or read data_text"
)


class Payload:
    """The payload of a message, parsed when it is read.

    Args:
        value: the value; of JSON the parsed one, in which numbers may be rounded.
        body: where its text is; None: the payload is not JSON.
        index: its element in the body, of a batch; None: the body is the payload.
        parse: replaces the parser of the text.
    """

    __slots__ = ("_body", "_index", "_is_read", "_parse", "_value")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Payload):
            return NotImplemented
        return (self.text, self._value) == (other.text, other._value)

    def __hash__(self) -> int:
        return hash(self.text)

    def __init__(
        self,
        value: Any,
        body: Body | None = None,
        index: int | None = None,
        parse: Parse | None = None,
    ) -> None:
        self._value = value
        self._body = body
        self._index = index
        self._parse = parse
        self._is_read = body is None

    @property
    def text(self) -> str | None:
        """The text as it was sent; None: the payload is not JSON."""
        return None if self._body is None else self._body.payload(self._index).decode()

    @property
    def value(self) -> Any:
        """The value.

        Raises:
            UnreadablePayload: it cannot be read without rounding a number.
        """
        if not self._is_read and self._body is not None:
            if self._parse is not None:
                self._value = _parse_with(self._parse, self.text or "")
            elif not self._body.is_exact:
                self._value = _parse_exactly(self._body.payload(self._index))
            self._is_read = True
        return self._value


class Body:
    """The body of a request, as JSON.

    Args:
        is_payload: the whole body is a payload.

    Raises:
        ValueError: it is not JSON.
    """

    def __init__(self, content: bytes, *, is_payload: bool = False) -> None:
        self.content = content
        self._is_complete = True
        try:
            self.parsed: Any = orjson.loads(content)
        except orjson.JSONDecodeError:
            # A payload beyond the limits of the parser is left out, and read when it is needed.
            if not is_beyond_parser(content):
                raise
            self._is_complete = False
            self.parsed = None if is_payload else orjson.loads(self._without_payloads())

    def payload(self, index: int | None) -> bytes:
        """The text of the payload of an element; None: it is the body."""
        if index is None:
            return self.content
        start, end = self._spans[index] or (0, 0)
        return self.content[start:end]

    @cached_property
    def is_exact(self) -> bool:
        """Whether no number was rounded."""
        return self._is_complete and _has_exact_numbers(self.content)

    @cached_property
    def _spans(self) -> list[Span | None]:
        return list(_payload_spans(self.content))

    def _without_payloads(self) -> bytes:
        parts, at = [], 0
        for span in self._spans:
            if span is not None:
                parts += [self.content[at : span[0]], b"null"]
                at = span[1]
        return b"".join((*parts, self.content[at:]))


def is_beyond_parser(content: bytes) -> bool:
    """Whether a text has numbers, or levels, that orjson does not parse."""
    if _levels(content) > LEVELS_MAX:
        return True
    numbers = (found[1] for found in _NUMBER.finditer(content) if found[1])
    return any(abs(_float(text)) == inf for text in numbers)


def _levels(content: bytes) -> int:
    """The levels of arrays and objects.

    Raises:
        ValueError: a string does not end.
    """
    level = deepest = 0
    for found in _NESTED_TOKEN.finditer(content):
        token = found[0]
        if token == b'"':
            raise ValueError("a string does not end")
        level += _STEPS.get(token, 0)
        deepest = max(deepest, level)
    return deepest


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _payload_spans(content: bytes) -> Iterator[Span | None]:
    """The place of the member `data` in an object, or in each element of an array."""
    wanted_level = 2 if content.lstrip().startswith(b"[") else 1
    # One character for each byte.
    characters = content.decode("latin-1")
    level = at = 0
    span: Span | None = None
    name = b""
    while token := _TOKEN.search(content, at):
        text, at = token[0], token.end()
        if text in b"[{":
            level += 1
            if level == wanted_level:
                span = None
        elif text in b"]}":
            if level == wanted_level:
                yield span
            level -= 1
        elif level == wanted_level and text == b":" and _name(name) == "data":
            span = _span_of_value(content, characters, at)
            at = span[1]
        elif level == wanted_level and text[:1] == b'"':
            name = text


def _span_of_value(content: bytes, characters: str, at: int) -> Span:
    spaces = _SPACES.match(content, at)
    assert spaces is not None
    start = spaces.end()
    with suppress(json.JSONDecodeError, RecursionError):
        return start, _SCANNER.raw_decode(characters, start)[1]
    level = 0
    for found in _NESTED_TOKEN.finditer(content, start):
        level += _STEPS.get(found[0], 0)
        if level <= 0:
            return start, found.end()
    raise ValueError("a value does not end")


def _name(text: bytes) -> Any:
    return orjson.loads(text) if len(text) > 1 else None


def _has_exact_numbers(content: bytes) -> bool:
    """Whether orjson's value of each number is exact; False also for some texts in strings."""
    # A regular expression takes twenty times as long as the parser.
    classes = content.translate(NUMBER_CLASSES)
    if SMALL_NUMBER in classes:
        return False
    at = classes.find(LONG_NUMBER)
    while at >= 0:
        found = _NUMBER_AT.match(content, at)
        assert found is not None
        text = found[0]
        is_integer = text.isdigit() and len(text) < 20 and int(text) < 2**63
        if not is_integer and not _is_exact_float(text.decode()):
            return False
        at = classes.find(LONG_NUMBER, found.end())
    return True


def _is_exact_float(text: str) -> bool:
    """Whether a float holds a decimal: it has its value, or is how programs write that float."""
    try:
        number, exact = float(text), Decimal(text)
        return exact == Decimal(repr(number)) or exact == Decimal(f"{number:.17g}")
    except (ValueError, InvalidOperation):
        # A part of a string, or an exponent of 19 digits.
        return False


def _parse_exactly(text: bytes) -> Any:
    try:
        if not is_beyond_parser(text) and _has_exact_numbers(text):
            # Another payload of the batch is the reason.
            return orjson.loads(text)
        if _levels(text) > LEVELS_MAX:
            raise RecursionError
        return json.loads(
            text, parse_float=_exact_float, parse_int=_exact_int, parse_constant=_no_constant
        )
    except RecursionError:
        raise UnreadablePayload(
            f"the payload has too many levels for the parser: {_WAY_ON}"
        ) from None
    except ValueError as error:
        raise UnreadablePayload(f"the payload is not JSON: {error}") from None


def _exact_float(text: str) -> float:
    is_short = len(text) < len(LONG_NUMBER) and "e" not in text.lower()
    if not is_short and not _is_exact_float(text):
        raise UnreadablePayload(_not_held(text, "a float does not hold"))
    return float(text)


def _exact_int(text: str) -> int:
    limit = sys.get_int_max_str_digits()
    if 0 < limit < len(text.lstrip("-")):
        raise UnreadablePayload(_not_held(text, f"has more than {limit} digits"))
    return int(text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _parse_with(parse: Parse, text: str) -> Any:
    try:
        return parse(text)
    except (ValueError, ArithmeticError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise UnreadablePayload(f"parse= does not read the payload: {reason}") from error


def _not_held(number: str, reason: str) -> str:
    shown = number if len(number) <= _SHOWN_CHARACTERS else f"{number[:_SHOWN_CHARACTERS]}…"
    return f"the payload has the number {shown}, which {reason}: {_WAY_ON}"
