"""Mistakes with retention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import batches, periods, upkeep

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


def _always(sim: Simulation) -> None:
    """Let the run drop periods."""
    sim.database.maintained = True


@mutant
def period_with_open_gap_dropped(sim: Simulation) -> None:
    """A period that has ended counts as complete."""
    _always(sim)
    swap(periods, "settle_period", periods.mark_settled)


@mutant
def period_with_pending_deliveries_dropped(sim: Simulation) -> None:
    """A period that is old enough is dropped, with deliveries that are pending."""
    _always(sim)
    swap(periods, "has_pending_lanes", lambda db, tx, last_batch: False)
    swap(periods, "drop_period", periods.mark_dropped)


@mutant
def log_period_begins_without_leader_change(sim: Simulation) -> None:
    """When a period of the log begins, the leader may go on with the next batch it knows."""
    _always(sim)

    swap(batches, "clear_leader", lambda db, tx: None)


@mutant
def events_of_replay_dropped(sim: Simulation) -> None:
    """Replays that are possible, or pending, do not keep a period."""
    _always(sim)
    for name in ("pinned_by_ranges", "pinned_by_replays", "pinned_by_jobs"):
        swap(periods, name, lambda db, tx, *_: False)


@mutant
def lane_with_pending_deliveries_removed(sim: Simulation) -> None:
    """A lane of an older generation is removed although its deliveries are pending."""
    _always(sim)

    def is_older(db: Any, tx: Any, lane: Any, _: int) -> bool:
        return bool(lane["generation"] < tx.get(db.endpoint, lane["endpoint_id"])["generation"])

    swap(upkeep, "is_unused", is_older)
