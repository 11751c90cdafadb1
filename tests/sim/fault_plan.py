"""When the faults of a run occur: most of them while a request, a write or a gap is open."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.sim import moments
from tests.sim.faults import TRIES
from tests.sim.restores import Restores
from tests.sim.stores import batches, change, future_events, records

if TYPE_CHECKING:
    import random

    from tests.sim.database.connection import Connection
    from tests.sim.faults import Faults
    from tests.sim.simulation import Simulation


class FaultPlan:
    """Watches for the moments of a run at which faults occur.

    Args:
        rng: chooses how many faults there are, and when.
    """

    def __init__(self, simulation: Simulation, faults: Faults, rng: random.Random) -> None:
        self._world, self._fleet = simulation.world, simulation.fleet
        self._moments = simulation.checker.moments
        self._faults = faults
        self._rng = rng
        self._restores = Restores(simulation, rng)
        self._recorder: Connection | None = None
        self._sequencer: Connection | None = None
        self._commander: Connection | None = None
        simulation.database.before_step = {
            records.write_acknowledgements.__name__: self._on_record,
            batches.write_batch.__name__: self._on_batch,
            batches.write_replays.__name__: self._on_replays,
            batches.write_fed.__name__: self._on_fed,
            change.write_message.__name__: self._on_change,
            future_events.move_events.__name__: self._on_move,
        }

    def make(self, requests: int, events: int, during_s: float) -> None:
        """Plan the faults.

        Args:
            requests: approximate number of requests of the run.
            events: number of events of the run.
            during_s: no fault is injected later.
        """
        rng, world, faults = self._rng, self._world, self._faults
        at = self._moments.at
        # With few of them most relays are healthy, and have to take over in time.
        count = rng.choice((0, 2, 5, 20, 40))
        for _ in range(rng.choice((0, 0, 1, 2)) if count else 0):
            at(moments.RECORD, rng.randrange(1, requests), self._hang_recording)
        for _ in range(rng.choice((0, 0, 1, 2)) if count else 0):
            at(moments.BATCH, rng.randrange(1, events), self._hang_sequencing)
        for _ in range(rng.choice((0, 1, 2)) if count else 0):
            at(moments.RECORD, rng.randrange(1, requests), self._orphan_recording)
        for _ in range(rng.choice((0, 0, 1, 2)) if count else 0):
            at(moments.REQUEST, rng.randrange(1, requests), self._isolate_at_once)
        for _ in range(rng.choice((0, 1, 2)) if count else 0):
            at(moments.REPLAY, rng.randrange(1, 10), self._terminate_soon)
        for _ in range(rng.choice((0, 1, 3)) if count else 0):
            at(moments.FEED, rng.randrange(1, 20), self._terminate_soon)
        for _ in range(rng.choice((0, 1, 3)) if count else 0):
            at(moments.FEED, rng.randrange(1, 20), self._strike_soon)
        for _ in range(rng.choice((0, 2, 4)) if count else 0):
            at(moments.COMMAND, rng.randrange(1, 16), self._disconnect_soon)
        for _ in range(rng.choice((0, 1, 2)) if count else 0):
            at(moments.CHANGE, rng.randrange(1, 12), self._disconnect_soon)
        for _ in range(rng.choice((0, 1, 4)) if count else 0):
            at(moments.HELD, rng.randrange(1, 60), self._strike_at_once)
        if count and rng.random() < 0.5:
            world.at(rng.random() * during_s, None, faults.hold_rows)
        for _ in range(count):
            u = rng.random()
            if u < 0.1:
                at(moments.TICK, rng.randrange(1, 10), self._strike_at_once)
            elif u < 0.4:
                at(moments.REQUEST, rng.randrange(1, requests), self._strike_soon)
            elif u < 0.6:
                at(moments.GAP, rng.randrange(1, 20), self._strike_soon)
            elif u < 0.75:
                world.at_step(int(rng.expovariate(1 / 20_000)), faults.strike)
            else:
                world.at(rng.random() * during_s, None, faults.strike)
        if count and rng.random() < 0.25:
            self._restores.plan(during_s)

    # ---------------------------------------------------------------- moments

    def _on_record(self, connection: Connection) -> None:
        self._recorder = connection
        self._moments.come(moments.RECORD, connection.process.name)

    def _on_batch(self, connection: Connection) -> None:
        self._sequencer = connection
        self._moments.come(moments.BATCH, connection.process.name)

    def _on_replays(self, connection: Connection) -> None:
        self._sequencer = connection
        self._moments.come(moments.REPLAY, connection.process.name)

    def _on_fed(self, connection: Connection) -> None:
        self._sequencer = connection
        self._moments.come(moments.FEED, connection.process.name)

    def _on_move(self, connection: Connection) -> None:
        if connection.process.name in self._fleet.relays:
            self._moments.come(moments.HELD, connection.process.name)

    def on_command(self, connection: Connection) -> None:
        """A command of an operator begins on a connection."""
        self._commander = connection
        self._moments.come(moments.COMMAND)

    def _on_change(self, connection: Connection) -> None:
        self._commander = connection
        self._moments.come(moments.CHANGE)

    # ----------------------------------------------------------------- faults

    def _hang_recording(self, _: str) -> None:
        assert self._recorder is not None
        self._hang_soon(self._recorder)

    def _hang_sequencing(self, _: str) -> None:
        assert self._sequencer is not None
        self._hang_soon(self._sequencer)

    def _hang_soon(self, connection: Connection) -> None:
        """Hang a session while its write is executed, or before its next message is complete."""
        delay_s = self._world.rng.expovariate(1000)
        self._world.after(delay_s, None, self._faults.hang_while_writing, connection)

    def _orphan_recording(self, _: str, tries: int = TRIES) -> None:
        """Stall the statement that is about to be executed, and stop its relay.

        At once it stalls before it locks its fence, or with it; later also in its commit.  The
        take-over is checked if the other relays are healthy, so this waits for such a statement.
        """
        assert self._recorder is not None
        rng, recorded = self._world.rng, self._moments.counts[moments.RECORD]
        if tries and not self._fleet.successors_of(self._recorder.process):
            again = partial(self._orphan_recording, tries=tries - 1)
            self._moments.at(moments.RECORD, recorded + rng.randrange(1, 10), again)
        elif rng.random() < 0.7:
            self._faults.orphan_statement(self._recorder)
        else:
            delay_s = rng.expovariate(3000)
            self._world.after(delay_s, None, self._faults.orphan_statement, self._recorder)

    def _isolate_at_once(self, name: str) -> None:
        self._faults.isolate_sender(self._fleet.relays[name])

    def _disconnect_soon(self, _: str) -> None:
        """Disconnect an operator between two reads of a plan, or while its change is written."""
        delay_s = self._world.rng.expovariate(self._world.rng.choice((100, 1000)))
        self._world.after(delay_s, None, self._faults.disconnect_operator, self._commander)

    def _terminate_soon(self, _: str) -> None:
        """Terminate the session that is about to write a batch, before or after its commit."""
        assert self._sequencer is not None
        delay_s = self._world.rng.expovariate(3000)
        self._world.after(delay_s, None, self._faults.terminate_session, self._sequencer)

    def _strike_soon(self, name: str) -> None:
        """Inject a fault soon: before the response or the next batch, or while one is written."""
        delay_s = self._world.rng.expovariate(self._world.rng.choice((30, 30, 1)))
        self._world.after(delay_s, None, self._faults.strike, self._fleet.relays[name])

    def _strike_at_once(self, name: str) -> None:
        """Inject a fault after runs or moves were decided, before their message or within it."""
        delay_s = self._world.rng.expovariate(300)
        self._world.after(delay_s, None, self._faults.strike, self._fleet.relays[name])
