"""Default schema name, and the error for a missing schema.

Producers import this module, so it has few imports.
"""

from __future__ import annotations

import shlex

from outbox.errors import SchemaMissing

SCHEMA = "relay"
"""The default schema."""


def migrate_command(schema: str) -> str:
    """The shell command that creates this schema."""
    if schema == SCHEMA:
        return "outbox migrate"
    return f"outbox migrate --schema {shlex.quote(schema)}"


def schema_missing(schema: str) -> SchemaMissing:
    """The error for a missing schema."""
    return SchemaMissing(f'schema "{schema}" is not there; run: {migrate_command(schema)}')
