"""What a filter may say: the inside of `$ ? (…)`, a condition on the payload.

The language is SQL/JSON path as the database has it; the database also says
whether a filter is written correctly.  Refused here is what would let one
endpoint's filter hold up everybody's events, or fail while it is asked:

* a comparison of two paths: PostgreSQL compares each of the one with each of the other,
  and no time-out interrupts that (two arrays of 100,000 took minutes);
* `**`, filters inside the filter, several subscripts in one pair of brackets, and more than
  one `keyvalue()`, whose work or memory multiplies with every level;
* back-references and looking around in like_regex, which do not match in linear time;
* variables, of which there are none, and methods for times, whose outcome
  depends on the session's time zone: both are errors even where PostgreSQL
  says that errors are suppressed;
* what closes the condition and begins something after it, comments, and
  backslashes outside of texts, which could hide any of these.
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
# A backslash that is not itself escaped, and the number of a group.
_BACK_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")
_LOOKS_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
_TIMES = frozenset({"date", "datetime", "time", "time_tz", "timestamp", "timestamp_tz"})
_REFUSED = {
    "**": '"**" looks at every level of the payload; name the way, as in $.order.items[*].sku',
    "/*": "comments have no place here",
    "?": "a filter inside the filter is not allowed; join conditions with &&",
    "\\": "a backslash may stand in a text only",
}


def check(text: str) -> None:
    """Refuse what the database must not be asked.

    Raises:
        UsageError: one line that says what is wrong.
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
                f"filter: there are no variables, such as {text[match.start() :][:20]}"
            )
        if kind == "text" and last_word == "like_regex":
            _check_regex(piece)
        is_method = before == "." and text[match.end() :].lstrip().startswith("(")
        if is_method and piece.lower() in _TIMES:
            raise UsageError(
                f"filter: .{piece}() depends on the time zone and is not allowed; "
                "times in RFC 3339 and UTC compare as texts"
            )
        keyvalues += is_method and piece.lower() == "keyvalue"
        if keyvalues > 1:
            raise UsageError("filter: .keyvalue() may stand in it once")
        if piece == '"':
            raise UsageError('filter: a text is not closed: a " is missing')
        if piece in _REFUSED:
            raise UsageError(f"filter: {_REFUSED[piece]}")
        _enter(clauses, piece, is_comparison=kind == "comparison")
        last_word = piece.lower() if kind == "word" else ""
        before = piece
    if len(clauses) > 1:
        raise UsageError(f'filter: a "{_CLOSES[clauses[-1].opened_by]}" is missing')


@dataclass(slots=True)
class _Clause:
    """What stands in one pair of brackets, up to where it is read."""

    opened_by: str
    has_path: bool = False
    """The operand that is read now leads into the payload."""
    compared_with_path: bool = False
    """So does the one that it is compared with."""
    ever_has_path: bool = False


_CLOSES = {"(": ")", "[": "]"}


def _enter(clauses: list[_Clause], piece: str, *, is_comparison: bool) -> None:
    """Read on: nothing is compared but a path with a constant."""
    clause = clauses[-1]
    if is_comparison:
        clause.compared_with_path, clause.has_path = clause.has_path, False
    elif piece in ("&&", "||"):
        clause.compared_with_path = clause.has_path = False
    elif piece in _CLOSES:
        clauses.append(_Clause(piece))
    elif piece in _CLOSES.values():
        if _CLOSES.get(clause.opened_by) != piece:
            raise UsageError(f'filter: a "{piece}" closes what was never opened')
        clauses.pop()
        if clause.ever_has_path:
            _lead(clauses[-1])
    elif piece in ("@", "$"):
        _lead(clause)
    elif piece == "," and clause.opened_by == "[":
        raise UsageError(
            "filter: one subscript at a time; join conditions with ||, or name a range (0 to 3)"
        )


def _lead(clause: _Clause) -> None:
    """There is a path into the payload."""
    clause.has_path = clause.ever_has_path = True
    if clause.compared_with_path:
        raise UsageError(
            "filter: compare with a constant; two numbers of the payload by their difference, "
            "as in (@.total - @.paid) > 0"
        )


def _check_regex(literal: str) -> None:
    """Refuse what a regular expression, in quotation marks, must not have."""
    expression = _ESCAPE.sub(_unescape, literal[1:-1])
    if _BACK_REFERENCE.search(expression):
        raise UsageError("filter: back-references such as \\1 are not allowed in like_regex")
    if _LOOKS_AROUND.search(expression):
        raise UsageError("filter: looking ahead, as (?=…) does, is not allowed in like_regex")


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return match[4]
    point = int(code, 16)
    return chr(point) if point <= 0x10FFFF else ""
