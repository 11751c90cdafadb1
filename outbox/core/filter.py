"""What a filter may say: the inside of `$ ? (…)`, a condition on the payload.

The language is SQL/JSON path as the database has it; the database also says
whether a filter is written correctly.  Refused here is what would let one
endpoint's filter hold up everybody's events, or fail while it is asked:

* `**` and filters inside the filter, whose work multiplies with every level;
* back-references in like_regex, which no longer match in linear time;
* variables, of which there are none, and methods for times, whose outcome
  depends on the session's time zone: both are errors even where PostgreSQL
  says that errors are suppressed;
* what closes the condition and begins something after it, comments, and
  backslashes outside of texts, which could hide any of these.
"""

from __future__ import annotations

import re

from outbox.errors import UsageError

FILTER_BYTES_MAX = 1024

_TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<word>\w+)
  | (?P<variable>\$(?=["\w]))
  | (?P<other>\*\*|/\*|.)
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|(.))")
# A backslash that is not itself escaped, and the number of a group.
_BACK_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")
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
    depth = 0
    last_word = before = ""
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup, match[0]
        if piece.isspace():
            continue
        if kind == "variable":
            raise UsageError(
                f"filter: there are no variables, such as {text[match.start() :][:20]}"
            )
        if kind == "text" and last_word == "like_regex" and _back_reference(piece):
            raise UsageError("filter: back-references such as \\1 are not allowed in like_regex")
        is_method = before == "." and text[match.end() :].lstrip().startswith("(")
        if is_method and piece.lower() in _TIMES:
            raise UsageError(
                f"filter: .{piece}() depends on the time zone and is not allowed; "
                "times in RFC 3339 and UTC compare as texts"
            )
        if piece == '"':
            raise UsageError('filter: a text is not closed: a " is missing')
        if piece in _REFUSED:
            raise UsageError(f"filter: {_REFUSED[piece]}")
        depth += (piece == "(") - (piece == ")")
        if depth < 0:
            raise UsageError('filter: a ")" closes what was never opened')
        last_word = piece.lower() if kind == "word" else ""
        before = piece
    if depth:
        raise UsageError('filter: a ")" is missing')


def _back_reference(literal: str) -> bool:
    """Whether a text in quotation marks, read as a regular expression, has one."""
    return _BACK_REFERENCE.search(_ESCAPE.sub(_unescape, literal[1:-1])) is not None


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return match[4]
    point = int(code, 16)
    return chr(point) if point <= 0x10FFFF else ""
