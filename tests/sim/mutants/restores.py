"""Mistakes after a restore of the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.cluster.timeline import History
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import starts, timeline

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def restore_not_noticed(sim: Simulation) -> None:
    """The identity of the database is not compared with that of the last batch."""
    swap(timeline, "history_of_server", lambda db: History(None, None))
    swap(timeline, "incarnation_holds", lambda db, tx: True)


@mutant
def restore_in_place_not_noticed(sim: Simulation) -> None:
    """Only the identity is compared, which a restore into the same database does not change."""
    swap(timeline, "incarnation_holds", lambda db, tx: True)


@mutant
def retention_counts_what_a_dump_brought_back(sim: Simulation) -> None:
    """What was observed before a restore counts for what may be dropped after it."""
    sim.database.maintained = True
    swap(timeline, "begin_odometer", lambda db, tx: None)


@mutant
def restored_snapshot_keeps_its_incarnation(sim: Simulation) -> None:
    """A position of what came after a snapshot of the disks is taken for one of its own."""
    new_incarnation, cursor = timeline.new_incarnation, sim.database.cursor
    swap(
        timeline,
        "new_incarnation",
        lambda db: cursor.rows[1]["incarnation"] or new_incarnation(db),
    )


@mutant
def position_used_before_a_restore_is_noticed(sim: Simulation) -> None:
    """A position is compared with the stored history, which is not the server's any more."""
    swap(starts, "history_changed", lambda db, tx: False)


@mutant
def lanes_after_restore_numbered_by_counter(sim: Simulation) -> None:
    """The first lanes after a restore have the next generation, which may have existed before."""
    swap(timeline, "first_generation", lambda db, generation: generation + 1)
