"""Errors of the store's statements."""

from __future__ import annotations

from outbox.errors import CursorBroken


class Fenced(Exception):
    """The write was rejected by the fence: this replica is no longer the owner."""


def truncated(table: str) -> CursorBroken:
    """The error for a table without the row that its migration wrote."""
    return CursorBroken(f"the table {table} was emptied; restore it from a backup")
