"""Subscription patterns: which event types a pattern matches.

A type is dot-separated segments of letters, digits, `_` and `-`, which do not begin with `-`.  In a
pattern `*` matches exactly one segment and a last `**` one or more:

    order.paid      only order.paid
    order.*         order.paid, not order.item.added
    order.**        order.paid and order.item.added, not order
    **              everything but operational events

Types under `outbox.` are operational events.  Only patterns that start with `outbox` match
them, a wildcard never does.  The doctor's probe (`PROBE`) has no information for receivers,
so only its full type matches it.
"""

from __future__ import annotations

import re

from outbox.errors import UsageError

TYPE_BYTES_MAX = 255
RESERVED_PREFIX = "outbox."
PROBE = f"{RESERVED_PREFIX}probe"
"""The event that the doctor publishes to measure the latency."""

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_-]*"
TYPE = re.compile(rf"{_SEGMENT}(?:\.{_SEGMENT})*")
"""Matches a type in full; the table has the same expression as a constraint."""
_REGEX = {"*": _SEGMENT, "**": TYPE.pattern}


def segments(pattern: str) -> list[str]:
    """The segments of a pattern: words, `*`, or `**` as the last one.

    Raises:
        UsageError: the pattern is invalid.
    """
    # A valid pattern is ASCII, so characters are bytes; an invalid one may have lone surrogates.
    if len(pattern) > TYPE_BYTES_MAX:
        raise UsageError(f"type pattern: longer than {TYPE_BYTES_MAX} bytes: {pattern[:40]!r}…")
    parts = pattern.split(".")
    for segment in parts[:-1] if parts[-1] == "**" else parts:
        if segment != "*" and not re.fullmatch(_SEGMENT, segment):
            raise UsageError(
                f"type pattern: {pattern!r} is invalid: use segments of letters, digits, _ and - "
                'joined by dots, not beginning with -, "*" for one segment, a last "**" for the '
                "rest"
            )
    return parts


def parse(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; match a type with `fullmatch`.

    Raises:
        UsageError: the pattern is invalid.
    """
    parts = segments(pattern)
    regex = [_REGEX.get(segment, segment) for segment in parts]
    if parts[0] != "outbox":
        excluded = r"(?!outbox\.)"
    else:
        excluded = "" if pattern == PROBE else rf"(?!{re.escape(PROBE)}\Z)"
    return re.compile(excluded + r"\.".join(regex), re.ASCII)


class _Node:
    """A trie node: the patterns that start with the same segments."""

    __slots__ = ("items", "nodes", "rest")

    def __init__(self) -> None:
        self.nodes: dict[str, _Node] = {}
        # Items of patterns that end here, and of patterns that end with "**" after this node.
        self.items: list[int] = []
        self.rest: list[int] = []


class Patterns:
    """A trie of patterns, each with an item, that finds the items matching a type.

    The time of a lookup depends on the segments of the type and the number of matches, not on
    the number of patterns.
    """

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, pattern: str, item: int) -> None:
        """Add a pattern with its item.

        Raises:
            UsageError: the pattern is invalid.
        """
        node = self._root
        parts = segments(pattern)
        rest = parts[-1] == "**"
        for segment in parts[:-1] if rest else parts:
            node = node.nodes.setdefault(segment, _Node())
        (node.rest if rest else node.items).append(item)

    def matching(self, type: str) -> set[int]:  # noqa: A002
        """The items with a pattern that matches this valid type."""
        matching: set[int] = set()
        words = type.split(".")
        nodes = [self._root]
        for n, word in enumerate(words):
            # A wildcard in the first segment does not match operational events.
            covers = n > 0 or not type.startswith(RESERVED_PREFIX)
            following: list[_Node] = []
            for node in nodes:
                if covers and type != PROBE:
                    matching.update(node.rest)
                    if (any_word := node.nodes.get("*")) is not None:
                        following.append(any_word)
                if (same := node.nodes.get(word)) is not None:
                    following.append(same)
            nodes = following
        for node in nodes:
            matching.update(node.items)
        return matching
