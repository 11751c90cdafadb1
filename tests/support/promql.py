"""A tokenizer for PromQL: the metrics and labels that an expression uses.

It has no grammar and classifies a name by its neighbours: enough to check every name against the
catalogue, while promtool checks the syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""\s+ | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>[0-9][\w.]*) | (?P<name>[a-zA-Z_:][\w:]*) | (?P<sign>=~|!~|!=|==|<=|>=|.)""",
    re.VERBOSE,
)
_OPERATORS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}


@dataclass
class Used:
    """The names that an expression uses."""

    metrics: set[str] = field(default_factory=set)
    matchers: list[tuple[str, str, str]] = field(default_factory=list)
    """Metric, label, and the value or pattern."""
    grouped: set[str] = field(default_factory=set)
    """Labels outside of braces."""


def used(expression: str) -> Used:
    """The names in an expression."""
    tokens = [
        (match.lastgroup, match.group())
        for match in _TOKEN.finditer(expression)
        if match.lastgroup is not None
    ]
    found = Used()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name" or text in _OPERATORS:
            continue
        if text in _LISTS:
            end = _closing(tokens, at, ")")
            found.grouped |= {name for kind, name in tokens[at:end] if kind == "name"}
            at = end + 1
        elif following == "{":
            end = _closing(tokens, at, "}")
            found.metrics.add(text)
            inside = tokens[at + 1 : end]
            for n in range(0, len(inside), 4):
                (_, label), _, (_, value) = inside[n : n + 3]
                found.matchers.append((text, label, value[1:-1]))
            at = end + 1
        elif following != "(" and following not in _LISTS:
            found.metrics.add(text)
    return found


def _closing(tokens: list[tuple[str, str]], at: int, sign: str) -> int:
    return next(n for n in range(at, len(tokens)) if tokens[n] == ("sign", sign))
