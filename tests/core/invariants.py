"""The exception that models raise when the code under test is wrong."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold."""


def expect(holds: bool, what: str, *seen: object) -> None:
    """Raise a Violation with the details in `seen` unless the condition holds."""
    if not holds:
        raise Violation(f"{what}: {seen}" if seen else what)
