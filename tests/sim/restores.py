"""Restores: the database is replaced by an earlier dump of it, while relays run or are stopped.

The checkers' records of the database are replaced as well.  What receivers have seen stays, so
that a lane and number that get another event are found.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from tests.sim.database import dumps

if TYPE_CHECKING:
    import random

    from tests.sim.database.dumps import Dump
    from tests.sim.simulation import Simulation

START_AFTER_S = 0.2
"""Delay of a restore after the last relay has stopped."""


class Restores:
    """Dumps the database of a simulation, and restores it.

    Args:
        rng: chooses when, and how.
    """

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._sim = simulation
        self._rng = rng
        checker = simulation.checker
        self._parts = (
            checker, checker.timetable, checker.shares, checker.replayed, checker.fed,
            checker.operational,
        )  # fmt: skip
        self._dumped: tuple[Dump, list[dict[str, Any]]] | None = None

    def plan(self, during_s: float) -> None:
        """Plan a dump, and one or two restores of it."""
        rng, world = self._rng, self._sim.world
        # Possibly before the first relay has started.
        dumped_at = rng.choice((0.0, *[rng.random() * during_s] * 5))
        world.at(dumped_at, None, self._dump)
        for _ in range(rng.choice((1, 1, 2))):
            world.at(rng.uniform(dumped_at, during_s), None, self._begin)

    def _dump(self) -> None:
        if self._sim.database.up:
            records = [{name: vars(each)[name] for name in each.UNDONE} for each in self._parts]
            self._dumped = dumps.dump(self._sim.database), deepcopy(records)
            self._sim.log("the database is dumped")
            # The dump does not have the event that the position has seen, and gives its id again.
            self._sim.operator.keep_position()

    def _begin(self) -> None:
        sim, rng = self._sim, self._rng
        if self._dumped is None or sim.settling:
            return
        down_s = rng.choice((0.2, 1.0, sim.settings.lease_s * 2 * rng.random()))
        if rng.random() < 0.5:
            self._restore(down_s)
            return
        sim.fleet.stop_for(sim.fleet.stops_in_s + down_s + START_AFTER_S)
        sim.world.after(sim.fleet.stops_in_s + START_AFTER_S, None, self._restore, down_s)

    def _restore(self, down_s: float) -> None:
        sim, db = self._sim, self._sim.database
        if self._dumped is None or sim.settling:
            return
        sim.fleet.trouble(None, down_s)
        sim.crash_database(down_s)
        dumped, records = self._dumped
        events = {str(event.event_id) for event in db.outbox.values()}
        # A snapshot of the disks has the identity of the original, so an operator requests the
        # new lanes.
        # A dump that is restored into the same database has its identity, too, but no incarnation.
        kind = self._rng.choices(("dump", "snapshot", "dump in place"), (3, 4, 3))[0]
        identity = f"1/{db.restores + 2}" if kind == "dump" else db.identity
        dumps.restore(db, dumped, identity)
        shown = {"identity": "restored"} if kind == "snapshot" else {"incarnation": None}
        db.cursor.rows[1] = {**db.cursor.rows[1], **shown}
        # Together, because they refer to the same records of lanes.
        for each, values in zip(self._parts, deepcopy(records), strict=True):
            vars(each).update(values)
        sim.checker.restored(events)
        sim.faults.record(f"a {kind} of the database is restored in {down_s:.1f} s")
        # Possibly before a relay has noticed the restore, and then later.
        for after_s in (0.01, 120.0):
            sim.operator.use_kept_position(down_s + after_s * self._rng.random())
