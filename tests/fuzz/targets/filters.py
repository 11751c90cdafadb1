"""Filters of endpoints, with the database as an optional oracle."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any

from outbox.core.model.filter import FILTER_BYTES_MAX, validate_filter
from outbox.errors import UsageError
from tests.fuzz.target import Target, hold, refused

DSN_VARIABLE = "OUTBOX_FUZZ_DSN"
"""The DSN of a database that parses every accepted filter, if set."""

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BANNED = (
    ("**", "looks at every level"),
    ("?", "has a filter inside"),
    ("/*", "has a comment"),
    ("\\", "has a backslash outside of texts"),
)
_METHOD = re.compile(
    r"\.\s*(?:date|datetime|time|time_tz|timestamp|timestamp_tz)\s*\(", re.IGNORECASE
)
_VARIABLE = re.compile(r'\$(?=["\w])')
_REGEX = re.compile(r'like_regex ("(?:[^"\\]|\\.)*")')


def filters(raw: bytes) -> None:
    """An accepted filter contains nothing that delays or fails the events of all endpoints."""
    text = raw.decode("utf-8", "surrogateescape")
    try:
        validate_filter(text)
    except UsageError as error:
        refused(error, "filter")
        return
    hold(len(text.encode()) <= FILTER_BYTES_MAX, "it is longer than it may be")
    bare = _TEXT.sub('""', text)
    for banned, what in _BANNED:
        hold(banned not in bare, f"{text!r} {what}")
    hold(bare.count('"') % 2 == 0, f"{text!r} has a text that is not closed")
    hold(bare.count("(") == bare.count(")"), f"{text!r} closes what it did not open")
    hold(_METHOD.search(bare) is None, f"{text!r} depends on the time zone")
    hold(_VARIABLE.search(bare) is None, f"{text!r} has a variable")
    if DSN_VARIABLE in os.environ:
        _check_filter(text)


@lru_cache(1)
def _database() -> Any:
    import psycopg

    return psycopg.connect(os.environ[DSN_VARIABLE], autocommit=True)


def _check_filter(text: str) -> None:
    """Check PostgreSQL's own representation of a filter in the same way."""
    import psycopg

    connection = _database()
    try:
        (path,) = connection.execute("SELECT (%s)::jsonpath::text", [f"$ ? ({text})"]).fetchone()
        connection.execute('SELECT \'[1, {"a": "b"}]\'::jsonb @? %s::jsonpath', [f"$ ? ({text})"])
    except psycopg.errors.DataError:
        return  # PostgreSQL reports this when the endpoint is created.
    except psycopg.errors.SyntaxError:
        return
    bare = _TEXT.sub('""', path)
    hold(bare.startswith("$?(") and bare.endswith(")"), f"{text!r} is more than a filter: {path}")
    hold(bare.count("?") == 1, f"{text!r} has a filter inside: {path}")
    hold("**" not in bare, f"{text!r} looks at every level: {path}")
    hold(_METHOD.search(bare) is None, f"{text!r} depends on the time zone: {path}")
    hold('$"' not in path, f"{text!r} has a variable: {path}")
    for literal in _REGEX.findall(path):
        read = re.sub(r"\\(.)", r"\1", literal[1:-1])
        hold(not re.search(r"(?<!\\)(?:\\\\)*\\[1-9]", read), f"{text!r} refers back: {path}")


TARGETS = (
    Target(
        name="filters",
        one=filters,
        seeds=(
            b'@.total > 100 && @.currency == "EUR"',
            b'exists(@.items[*].sku) || !(@.a like_regex "^x(y|z)+$" flag "i")',
            b'@.type() == "string" && @.a.b.size() < 3 && @.x.double() >= 1.5e3',
            b'@.a like_regex "(a)\\\\1" && @."$x" == "**?/*"',
            b"@.items ? (@.x > 1)", b"@.** == 1", b'@.x == $"y"', b'@.a like_regex "(a)\\1"',
            b'@.at.datetime () < "2026-01-31".datetime("YYYY")',
            b'@.a starts with "b" && (@.x is unknown) is unknown && $.b[last - 1 to last] == null',
        ),
        words=(
            "**", "?", "/*", "*/", "\\", '"', "$", "$x", '$"x"', "@", "@.", "like_regex", " flag ",
            '"q"', "\\1", "\\\\1", "\\u005c1", "\\x5c1", "\\u{5c}1", ".datetime()", ".date()",
            ".keyvalue()", "exists(", ")", "(", "&&", "||", "!", "==", "is unknown", "starts with",
            "[*]", "[last]", " to ", "true", "null", "LIKE_REGEX", ". datetime", "$.a", "\xa0",
            "strict ", "lax ", ".**{2}", "--", "'", "\t",
        ),
        bytes_max=400,
        runs=6000,
    ),
)  # fmt: skip
