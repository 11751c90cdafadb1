"""Which event types a subscription pattern stands for.

A type is dot-separated segments of letters, digits and underscores.  In a
pattern `*` stands for exactly one segment and a last `**` for one or more:

    order.paid      only that
    order.*         order.paid, not order.item.added
    order.**        order.paid and order.item.added, not order
    **              everything but operational events

Types under `outbox.` are the relay's own operational events.  They only reach
patterns that say `outbox` themselves: a wildcard never covers it.  Nor does one cover the
doctor's probe (`PROBE`), which tells nobody anything: it reaches who names all of it.
"""

from __future__ import annotations

import re

from outbox.errors import UsageError

TYPE_BYTES_MAX = 255
RESERVED_PREFIX = "outbox."
PROBE = f"{RESERVED_PREFIX}probe"
"""What the doctor sends through the database, to time it."""

_SEGMENT = re.compile(r"[A-Za-z0-9_]+")
_REGEX = {"*": r"\w+", "**": r"\w+(?:\.\w+)*"}


def segments(pattern: str) -> list[str]:
    """Its segments, each of them a word, `*`, or as the last one `**`.

    Raises:
        UsageError: the pattern is not one.
    """
    # A character is a byte in whatever is one; what is none may have half characters.
    if len(pattern) > TYPE_BYTES_MAX:
        raise UsageError(f"type pattern: longer than {TYPE_BYTES_MAX} bytes: {pattern[:40]!r}…")
    found = pattern.split(".")
    for segment in found[:-1] if found[-1] == "**" else found:
        if segment != "*" and not _SEGMENT.fullmatch(segment):
            raise UsageError(
                f"type pattern: {pattern!r} is not one: use segments of letters, digits and _ "
                'joined by dots, "*" for one segment, a last "**" for the rest'
            )
    return found


def parse(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; match a type with `fullmatch`.

    Raises:
        UsageError: the pattern is not one.
    """
    found = segments(pattern)
    regex = [_REGEX.get(segment, segment) for segment in found]
    if found[0] != "outbox":
        unmeant = r"(?!outbox\.)"
    else:
        unmeant = "" if pattern == PROBE else rf"(?!{re.escape(PROBE)}\Z)"
    return re.compile(unmeant + r"\.".join(regex), re.ASCII)


class _Node:
    """The patterns that begin with the same segments."""

    __slots__ = ("items", "nodes", "rest")

    def __init__(self) -> None:
        self.nodes: dict[str, _Node] = {}
        # Of those that end here, and of those that end with a "**" after this.
        self.items: list[int] = []
        self.rest: list[int] = []


class Patterns:
    """Many patterns, each of an item, among which those that match a type are found.

    However many there are: what a look takes depends on the segments of the type, and on how
    many match it.
    """

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, pattern: str, item: int) -> None:
        """Another one.

        Raises:
            UsageError: the pattern is not one.
        """
        node = self._root
        found = segments(pattern)
        rest = found[-1] == "**"
        for segment in found[:-1] if rest else found:
            node = node.nodes.setdefault(segment, _Node())
        (node.rest if rest else node.items).append(item)

    def matching(self, type: str) -> set[int]:  # noqa: A002
        """The items of which a pattern stands for this type, which has to be one."""
        found: set[int] = set()
        words = type.split(".")
        wanted = [self._root]
        for n, word in enumerate(words):
            # One that comes first covers nothing of the relay's own.
            covers = n > 0 or not type.startswith(RESERVED_PREFIX)
            following: list[_Node] = []
            for node in wanted:
                if covers and type != PROBE:
                    found.update(node.rest)
                    if (any_word := node.nodes.get("*")) is not None:
                        following.append(any_word)
                if (same := node.nodes.get(word)) is not None:
                    following.append(same)
            wanted = following
        for node in wanted:
            found.update(node.items)
        return found
