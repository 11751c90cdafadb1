"""Filter validation: a filter is a SQL/JSON path condition on the payload, inside `$ ? (…)`.

The database checks the syntax.  This module rejects conditions that could delay the events of
all endpoints, or that fail during evaluation:

* a comparison of two paths: PostgreSQL compares each value of one with each value of the other,
  and no time-out interrupts it (two arrays of 100,000 took minutes);
* `**`, nested filters, several subscripts in one pair of brackets, and more than one
  `keyvalue()`: their time or memory multiplies with each level;
* back-references and lookaround in like_regex, which do not match in linear time;
* variables, which are never defined, and date and time methods, whose result depends on the
  session's time zone: both raise errors even where PostgreSQL suppresses errors;
* brackets that end the condition early, comments, and backslashes outside of strings, which
  could hide any of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outbox.errors import UsageError

FILTER_BYTES_MAX = 1024

_TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<word>\w+)
  | (?P<variable>\$(?=["\w]))
  | (?P<comparison>==|!=|<>|<=?|>=?)
  | (?P<other>&&|\|\||\*\*|/\*|.)
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|(.))")
# An unescaped backslash and a group number.
_BACK_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")
_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
_TIMES = frozenset({"date", "datetime", "time", "time_tz", "timestamp", "timestamp_tz"})
_REJECTED = {
    "**": '"**" searches every level of the payload; write the path, as in $.order.items[*].sku',
    "/*": "comments are not allowed",
    "?": "a nested filter is not allowed; join conditions with &&",
    "\\": "a backslash is allowed only in a string",
}


def validate_filter(text: str) -> None:
    """Reject a filter that is unsafe to evaluate.

    Raises:
        UsageError: the filter is not allowed; the message is one line.
    """
    if not text.strip():
        raise UsageError("filter: is empty; write a condition such as @.total > 100")
    if not text.isprintable():
        raise UsageError("filter: has a control character in it; write it on one line")
    if len(text.encode()) > FILTER_BYTES_MAX:
        raise UsageError(f"filter: longer than {FILTER_BYTES_MAX} bytes")
    clauses = [_Clause("")]
    keyvalues = 0
    last_word = before = ""
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup, match[0]
        if piece.isspace():
            continue
        if kind == "variable":
            raise UsageError(
                f"filter: variables such as {text[match.start() :][:20]} are not allowed"
            )
        if kind == "text" and last_word == "like_regex":
            _check_regex(piece)
        is_method = before == "." and text[match.end() :].lstrip().startswith("(")
        if is_method and piece.lower() in _TIMES:
            raise UsageError(
                f"filter: .{piece}() depends on the time zone and is not allowed; "
                "times in RFC 3339 and UTC compare as strings"
            )
        keyvalues += is_method and piece.lower() == "keyvalue"
        if keyvalues > 1:
            raise UsageError("filter: .keyvalue() is allowed only once")
        if piece == '"':
            raise UsageError('filter: a string is not closed: a " is missing')
        if piece in _REJECTED:
            raise UsageError(f"filter: {_REJECTED[piece]}")
        _process_token(clauses, piece, is_comparison=kind == "comparison")
        last_word = piece.lower() if kind == "word" else ""
        before = piece
    if len(clauses) > 1:
        raise UsageError(f'filter: a "{_CLOSES[clauses[-1].opened_by]}" is missing')


@dataclass(slots=True)
class _Clause:
    """Parser state of one pair of brackets."""

    opened_by: str
    has_path: bool = False
    """Whether the current operand has a path into the payload."""
    compared_with_path: bool = False
    """Whether the left operand of the current comparison has one."""
    ever_has_path: bool = False


_CLOSES = {"(": ")", "[": "]"}


def _process_token(clauses: list[_Clause], piece: str, *, is_comparison: bool) -> None:
    """Process a token; a path may only be compared with a constant."""
    clause = clauses[-1]
    if is_comparison:
        clause.compared_with_path, clause.has_path = clause.has_path, False
    elif piece in ("&&", "||"):
        clause.compared_with_path = clause.has_path = False
    elif piece in _CLOSES:
        clauses.append(_Clause(piece))
    elif piece in _CLOSES.values():
        if _CLOSES.get(clause.opened_by) != piece:
            raise UsageError(f'filter: a "{piece}" has no opening bracket')
        clauses.pop()
        if clause.ever_has_path:
            _record_path(clauses[-1])
    elif piece in ("@", "$"):
        _record_path(clause)
    elif piece == "," and clause.opened_by == "[":
        raise UsageError(
            "filter: use one subscript; join conditions with ||, or use a range (0 to 3)"
        )


def _record_path(clause: _Clause) -> None:
    """Record a path into the payload in the current operand."""
    clause.has_path = clause.ever_has_path = True
    if clause.compared_with_path:
        raise UsageError(
            "filter: compare with a constant; for two numbers of the payload compare their "
            "difference, as in (@.total - @.paid) > 0"
        )


def _check_regex(literal: str) -> None:
    """Reject back-references and lookaround in a quoted regular expression."""
    expression = _ESCAPE.sub(_unescape, literal[1:-1])
    if _BACK_REFERENCE.search(expression):
        raise UsageError("filter: back-references such as \\1 are not allowed in like_regex")
    if _LOOKAROUND.search(expression):
        raise UsageError("filter: lookaround such as (?=…) is not allowed in like_regex")


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return match[4]
    point = int(code, 16)
    return chr(point) if point <= 0x10FFFF else ""
