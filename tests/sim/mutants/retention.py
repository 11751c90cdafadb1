"""Mistakes with what is kept, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store import cursor, retention
from tests.sim.database.statements.retention import dropped, settled
from tests.sim.mutants.catalogue import mutant

if TYPE_CHECKING:
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


def _always(sim: Simulation) -> None:
    """The mistake is for those who drop something."""
    sim.database.maintained = True


@mutant
def a_period_dropped_that_holds_an_open_gap(sim: Simulation) -> None:
    """When a period has ended, all that is going to be in it is there."""
    _always(sim)
    sim.database.changed[retention.SETTLE_PERIOD] = settled


@mutant
def a_period_dropped_that_lanes_still_owe(sim: Simulation) -> None:
    """What is old enough goes, whoever still waits for it."""
    _always(sim)
    sim.database.changed[retention.OWING] = lambda db, tx, last_batch: [{"exists": False}]
    sim.database.changed[retention.DROP_PERIOD] = dropped


@mutant
def a_log_that_begins_behind_the_leader_s_back(sim: Simulation) -> None:
    """Batches are moved on, and whoever leads may go on with the number it knows."""
    _always(sim)

    def sign(db: Database, tx: Transaction, writer: int | None) -> str:
        # Who takes the lead signs as ever.
        if writer is not None:
            tx.change(db.cursor, 1, writer=writer)
        return "UPDATE 1"

    sim.database.changed[cursor.SIGN_CURSOR] = sign


@mutant
def a_replay_whose_events_are_dropped(sim: Simulation) -> None:
    """Only what was never given up counts as owed."""
    _always(sim)
    nothing = [{"exists": False}]
    sim.database.changed[retention.PINNED_BY_RANGES] = lambda db, tx, *_: nothing
    sim.database.changed[retention.PINNED_BY_REPLAYS] = lambda db, tx, *_: nothing
    sim.database.changed[retention.PINNED_BY_JOBS] = lambda db, tx, *_: nothing
