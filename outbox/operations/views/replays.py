"""How replays are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.backfill import Backfill


def planned(asked: Backfill, deliveries: int) -> dict[str, Any]:
    """What a backfill would make."""
    said = {"since": asked.since, "until": asked.until, "types": asked.types}
    return {"dry_run": True, "endpoint": asked.endpoint, **said, "deliveries": deliveries}
