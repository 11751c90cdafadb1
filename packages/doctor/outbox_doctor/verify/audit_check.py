"""A check of `outbox verify`: one query that returns the violations of an invariant, as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """An invariant, and the query that returns its violations."""

    name: str
    guarantee: str
    action: str
    """What to do about a violation."""
    query: str
    settings: str = ""
    """Statements that apply to this query only, such as SET LOCAL."""
