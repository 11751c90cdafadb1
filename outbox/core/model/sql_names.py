"""SQL identifiers and literals: validation and quoting."""

from __future__ import annotations

import re

from outbox.errors import UsageError

SCHEMA_BYTES_MAX = 50
"""PostgreSQL truncates identifiers at 63 bytes; channel names append a suffix to the schema's."""


def schema_name(name: str) -> str:
    """Validate and return a schema name.

    Raises:
        UsageError: the name is empty, too long, reserved or not printable.
    """
    if not name:
        raise UsageError("the schema's name is empty")
    if len(name.encode("utf-8", "replace")) > SCHEMA_BYTES_MAX:
        raise UsageError(f"the schema's name is longer than {SCHEMA_BYTES_MAX} bytes")
    if not name.isprintable():
        raise UsageError("the schema's name contains a non-printable character")
    if name.startswith("pg_") or name == "information_schema":
        raise UsageError(f'the schema cannot be "{name}": PostgreSQL reserves that name')
    return name


def quote_ident(name: str) -> str:
    """Quote a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote text as an SQL literal, for either value of standard_conforming_strings."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def setting_name(schema: str, name: str) -> str:
    """The name of a schema's session setting; characters that it cannot have become `_`."""
    return re.sub("^[0-9]|[^A-Za-z0-9_]", "_", schema) + "." + name


def search_path(schema: str) -> str:
    """The search path for all SQL of the relay.

    pg_temp is last: if it is not listed, PostgreSQL searches it first, and a caller of a
    SECURITY DEFINER function could shadow tables with temporary ones.
    """
    return f"{quote_ident(schema)}, pg_temp"
