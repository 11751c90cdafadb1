"""Texts of messages: plurals, and external values in bounded length, as visible characters.

A value may be a text of megabytes, an integer with ten thousand digits, which Python refuses
to format, or a deeply nested list.  A message about it must stay short, must not raise, and
must not control the terminal.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

QUOTED_CHARS_MAX = 80

COMPARED_MAX = 500

INDENTED_MAX = 40
"""Deeper levels of JSON are not indented further, because that would take megabytes."""

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""Characters that control a terminal (C0, DEL, C1), that hide or reorder others (zero width,
bidirectional), that begin lines, and those that cannot be encoded."""

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')

_TRUNCATING_REPR = reprlib.Repr()
_TRUNCATING_REPR.maxlevel = 2
_TRUNCATING_REPR.maxlist = _TRUNCATING_REPR.maxtuple = _TRUNCATING_REPR.maxdict = (
    _TRUNCATING_REPR.maxset
) = 3
_TRUNCATING_REPR.maxstring = _TRUNCATING_REPR.maxlong = _TRUNCATING_REPR.maxother = QUOTED_CHARS_MAX


def quoted(value: object) -> str:
    """The repr of a value, truncated."""
    try:
        return _TRUNCATING_REPR.repr(value)
    except ValueError:
        return "a number with too many digits"


def is_text(text: str) -> bool:
    """Whether text can be encoded as UTF-8.

    Invalid bytes in arguments, variables and bodies are decoded to lone surrogates.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def safe(text: str) -> str:
    """Escape characters that would control a terminal, or hide or reorder others: `\\u202e`.

    JSON text stays JSON of the same value.
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def safe_lines(text: str) -> str:
    """Escape as `safe` does, but for line breaks and tabs."""
    return re.sub(r"[^\n\t]+", lambda found: safe(found[0]), text)


def one_line(text: str) -> str:
    """Join lines and escape control characters, so that the text is one line."""
    return safe(" ".join(text.split()))


def indent_json(text: str) -> str:
    """Valid JSON text on several lines, with every value as it is written."""
    parts: list[str] = []
    depth = 0
    before = ""
    for part in _JSON_TOKEN.findall(text):
        if part in "]}":
            depth -= 1
            parts.append("" if before in "[{" else "\n" + "  " * min(depth, INDENTED_MAX))
        elif before and before in "[{,":
            parts.append("\n" + "  " * min(depth, INDENTED_MAX))
        parts.append(": " if part == ":" else part)
        depth += part in "[{"
        before = part
    return "".join(parts)


def count(number: int, noun: str) -> str:
    """`1 delivery`, `2 deliveries`."""
    if number == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {plural}"


def singular(nouns: str) -> str:
    """`delivery` from `deliveries`, and `lane` from `lanes`; not for nouns such as `batches`."""
    stem = nouns.removesuffix("ies")
    return nouns.removesuffix("s") if stem == nouns else f"{stem}y"


def truncate(text: str) -> str:
    """Truncate text for quoting in a message."""
    # Lone surrogates, from arguments that are not UTF-8, cannot be encoded for output.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= QUOTED_CHARS_MAX else text[: QUOTED_CHARS_MAX - 1] + "…"


def name_text(name: object) -> str:
    """A name for quoting in a message, up to a colon: YAML takes `{secret:value}` for a name."""
    return truncate(re.sub("(?s):.+", ":…", str(name)))


def closest(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that is most like another, for "did you mean" hints.

    The comparison takes time in proportion to the length of the word and to the number of known
    words, so a long word has no match, and only the first `COMPARED_MAX` are compared.
    """
    if len(word) > QUOTED_CHARS_MAX:
        return None
    return next(iter(difflib.get_close_matches(word, list(islice(known, COMPARED_MAX)), 1)), None)


def did_you_mean(word: str, known: Collection[str], otherwise: str | None = None) -> str:
    """The end of a message that there is no such word.

    Args:
        otherwise: the end if no known word is like it; None: all that are known.
    """
    if near := closest(word, known):
        return f'did you mean "{near}"?'
    return f"there are {', '.join(known)}" if otherwise is None else otherwise
