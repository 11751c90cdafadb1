"""Splits an input of the fuzzer into texts, numbers and choices.

Fields are separated by one character that is in no text of the product, so that inputs can be
read, and written by hand:

    order.*␟order.paid

A byte that is not UTF-8 becomes half of a surrogate pair, as in the arguments of a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

SEPARATOR = b"\x1f"

T = TypeVar("T")


class Data:
    """Returns the fields of an input in order; fields after the last are empty."""

    def __init__(self, raw: bytes) -> None:
        self._rest = raw

    @property
    def is_empty(self) -> bool:
        """Whether no fields are left."""
        return not self._rest

    def raw(self) -> bytes:
        """The next field."""
        field, _, self._rest = self._rest.partition(SEPARATOR)
        return field

    def text(self) -> str:
        """The next field as text."""
        return self.raw().decode("utf-8", "surrogateescape")

    def maybe(self) -> str | None:
        """The next field as text; None if it is empty."""
        return self.text() or None

    def number(self, most: int) -> int:
        """Return the next byte as a number from 0 to `most`, which is below 256."""
        first, self._rest = self._rest[:1], self._rest[1:]
        # "0" is the byte that a hand-written input uses for zero.
        return (first[0] - ord("0")) % (most + 1) if first else 0

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of these, chosen by the next byte."""
        return choices[self.number(len(choices) - 1)]

    def rest(self) -> bytes:
        """Return everything that is left."""
        rest, self._rest = self._rest, b""
        return rest


def is_text(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fields(*parts: bytes | str) -> bytes:
    """Return an input made of these fields."""
    return SEPARATOR.join(part.encode() if isinstance(part, str) else part for part in parts)
