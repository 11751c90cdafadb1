"""JSON form of replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.backfill import Backfill


def backfill_plan(backfill: Backfill, deliveries: int) -> dict[str, Any]:
    """JSON form of a backfill's dry run."""
    conditions = {"since": backfill.since, "until": backfill.until, "types": backfill.types}
    return {"dry_run": True, "endpoint": backfill.endpoint, **conditions, "deliveries": deliveries}
