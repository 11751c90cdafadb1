"""The schema's usual name, and what to say when it is not there.

Producers import this, so it imports next to nothing.
"""

from __future__ import annotations

import shlex

from outbox.errors import SchemaMissing

SCHEMA = "relay"
"""Where nobody names another one."""


def migrate_command(schema: str) -> str:
    """The command that makes this schema, as a shell takes it."""
    if schema == SCHEMA:
        return "outbox migrate"
    return f"outbox migrate --schema {shlex.quote(schema)}"


def schema_missing(schema: str) -> SchemaMissing:
    """The error for a schema that is not there."""
    return SchemaMissing(f'schema "{schema}" is not there; run: {migrate_command(schema)}')
