"""Names that go into SQL as identifiers."""

from __future__ import annotations

from outbox.errors import UsageError

SCHEMA_BYTES_MAX = 50
"""PostgreSQL cuts identifiers at 63 bytes; channels put a suffix behind ours."""


def schema_name(name: str) -> str:
    """The name itself, if a schema can be called so.

    Raises:
        UsageError: it is empty, too long, reserved or not text.
    """
    if not name:
        raise UsageError("the schema's name is empty")
    if len(name.encode("utf-8", "replace")) > SCHEMA_BYTES_MAX:
        raise UsageError(f"the schema's name is longer than {SCHEMA_BYTES_MAX} bytes")
    if not name.isprintable():
        raise UsageError("the schema's name has a character in it that cannot be printed")
    if name.startswith("pg_") or name == "information_schema":
        raise UsageError(f'the schema cannot be "{name}": PostgreSQL keeps that name for itself')
    return name


def quote_ident(name: str) -> str:
    """A name as an SQL identifier, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Text as an SQL literal, under standard_conforming_strings either way."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def search_path(schema: str) -> str:
    """The search path that all of our SQL runs with.

    pg_temp stands last, because unnamed it would be searched first, and a
    caller of a SECURITY DEFINER function could slip tables of its own in.
    """
    return f"{quote_ident(schema)}, pg_temp"
