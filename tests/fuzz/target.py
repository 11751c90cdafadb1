"""A fuzz target: a part of the product, and an invariant for every input.

A target is a function of bytes that raises when its invariant does not hold. The right result for
an input is unknown, so each target has an oracle: a bound, a round trip, a second and simpler
implementation, or the same input in another form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except layout: tab, line feed and carriage return."""


def _nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A part of the product under the fuzzer."""

    name: str
    one: Callable[[bytes], None]
    """Try one input; raises if the invariant does not hold."""
    seeds: Sequence[bytes] = ()
    """The first inputs, which reach code that only valid input reaches."""
    words: Sequence[str | bytes] = ()
    """The dictionary: fragments of valid inputs, so that the fuzzer need not guess them byte by
    byte.
    """
    bytes_max: int = 1024
    runs: int = 500
    """Inputs per run of the test suite: about half a second of work."""
    short_run_modules: Sequence[str] = ("outbox",)
    """The modules that a short hunt instruments; a long hunt instruments all."""
    prepare: Callable[[], None] = _nothing
    """Replace the parts that must not be reached; every target has its own process."""


class Broken(AssertionError):
    """The invariant of a target does not hold."""


def hold(condition: object, what: str) -> None:
    """Raise Broken unless the condition holds; `assert` may be optimised away."""
    if not condition:
        raise Broken(what)


def one_line(text: str, what: str, chars_max: int = 2000) -> str:
    """Require one line of bounded length without control characters."""
    hold(text, f"{what}: says nothing")
    hold(len(text) <= chars_max, f"{what}: {len(text)} characters: {text[:200]!r}…")
    hold(len(text.splitlines()) == 1, f"{what}: several lines: {text[:500]!r}")
    return text


def refused(error: Exception, what: str, chars_max: int = 3000) -> None:
    """Require an error message that can be displayed.

    The caller that displays it removes terminal control sequences; see the targets `commands` and
    `api`.
    """
    one_line(" ".join(str(error).split()), what, chars_max)


def storable(value: object, what: str, *, breaks: bool = False) -> None:
    """Require JSON that jsonb can store and a terminal can display.

    Args:
        breaks: Whether texts may contain line breaks.
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
