"""What is fuzzed: a piece of the product, and what has to hold for every input.

A target is a function of bytes that raises when something does not hold.  Nobody is asked
what the right answer is, so each has an oracle: a bound, a round trip, a second and simpler
implementation, or the same input in another way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""The same without what lays texts out: tabs and ends of lines."""


def _nothing() -> None:
    """Nothing is to be prepared."""


@dataclass(frozen=True, slots=True)
class Target:
    """A piece of the product under the fuzzer."""

    name: str
    one: Callable[[bytes], None]
    """Tries one input; raises if it does not hold."""
    seeds: Sequence[bytes] = ()
    """Inputs to begin with, which lead to what only a good input reaches."""
    words: Sequence[str | bytes] = ()
    """What inputs are made of, so that nobody has to guess them byte by byte."""
    bytes_max: int = 1024
    runs: int = 500
    """Inputs in the test suite: about half a second's worth."""
    looks_into: Sequence[str] = ("outbox",)
    """Of which modules a short hunt is told which ways are taken; a long one of all."""
    prepare: Callable[[], None] = _nothing
    """Puts something else in the place of what must not be reached; the process is its own."""


class Broken(AssertionError):
    """What has to hold does not."""


def hold(condition: object, what: str) -> None:
    """Break off if a condition is not met; `assert` may be optimised away."""
    if not condition:
        raise Broken(what)


def one_line(text: str, what: str, chars_max: int = 2000) -> str:
    """Hold a text for people to one line of bounded length without control characters."""
    hold(text, f"{what}: says nothing")
    hold(len(text) <= chars_max, f"{what}: {len(text)} characters: {text[:200]!r}…")
    hold(len(text.splitlines()) == 1, f"{what}: several lines: {text[:500]!r}")
    return text


def refused(error: Exception, what: str, chars_max: int = 3000) -> None:
    """Hold an error for people to a line that can be shown.

    Whoever shows it takes out what would steer a terminal; see the targets `commands` and
    `api`.
    """
    one_line(" ".join(str(error).split()), what, chars_max)


def storable(value: object, what: str, *, breaks: bool = False) -> None:
    """Hold JSON to what jsonb can hold and a terminal can show.

    Args:
        breaks: texts may have several lines.
    """
    if isinstance(value, str):
        found = (_STEERING if breaks else _CONTROL).search(value)
        hold(found is None, f"{what}: has {found and found[0]!r}")
    elif isinstance(value, dict):
        for name, each in value.items():
            storable(name, what)
            storable(each, f"{what}.{name}", breaks=name == "body")
    elif isinstance(value, list | tuple):
        for each in value:
            storable(each, what, breaks=breaks)
    else:
        hold(value is None or isinstance(value, bool | int | float), f"{what}: is {value!r}")
