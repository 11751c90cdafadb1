"""What the models of this directory say when the code under test is wrong."""

from __future__ import annotations


class Violation(AssertionError):
    """A promise was broken."""


def expect(holds: bool, what: str, *seen: object) -> None:
    """Raise a Violation unless it holds; `seen` goes with it."""
    if not holds:
        raise Violation(f"{what}: {seen}" if seen else what)
