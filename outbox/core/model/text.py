"""Somebody else's values in messages of ours: enough of them to be recognized, and no more.

A value may be a text of megabytes, a number of ten thousand digits, which Python refuses to
write, or a list that holds another one a hundred deep.  None of them may make an error that
says so longer than a line or two, or be the error itself, or steer the terminal that it is
shown on.
"""

from __future__ import annotations

import re
import reprlib

QUOTED_CHARS_MAX = 80

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_CUT = reprlib.Repr()
_CUT.maxlevel = 2
_CUT.maxlist = _CUT.maxtuple = _CUT.maxdict = _CUT.maxset = 3
_CUT.maxstring = _CUT.maxlong = _CUT.maxother = QUOTED_CHARS_MAX


def quoted(value: object) -> str:
    """A value as Python writes it, cut where it is long."""
    try:
        return _CUT.repr(value)
    except ValueError:
        return "a number of very many digits"


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: bytes of an argument, a variable or a body that are
    none come as halves of surrogate pairs.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def safe(text: str) -> str:
    """Text without characters that a terminal acts on."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """Text of several lines, or with characters that a terminal acts on, as one line."""
    return safe(" ".join(text.split()))


def cut(text: str) -> str:
    """The beginning of a text, for between quotation marks."""
    # What is no Unicode, as in an argument of other bytes, cannot be written down either.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= QUOTED_CHARS_MAX else text[: QUOTED_CHARS_MAX - 1] + "…"
