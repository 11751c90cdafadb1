"""What goes wrong: each fault begins at some step of the run, and heals by itself.

A step is anything that happens: so faults fall where most is done, between any two
moves of a relay, a statement or a message.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.sim.clockwork import Process
    from tests.sim.database.connection import Connection
    from tests.sim.simulation import Simulation


class Faults:
    """Injects faults into a simulation.

    Args:
        rng: which, whom, for how long.
    """

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._sim = simulation
        self._rng = rng
        self._victim: Process | None = None
        self.happened: list[tuple[float, str]] = []
        self._kinds: list[tuple[int, Callable[[], str | None]]] = [
            (5, self.kill_relay),
            (5, self.freeze_relay),
            (3, self.restart_relay),
            (2, self.restart_database),
            (4, self.terminate_backends),
            (4, self.stall_backends),
            (3, self.cut_connection),
            (2, self.hang_connection),
            (3, self.slow_network),
            (3, self.stall_network),
            (2, self.leave_alone),
            (1, self.shift_the_clock),
            (4, self.receiver_down),
            (2, self.receiver_hangs),
            (2, self.receiver_busy),
        ]

    def strike(self, victim: Process | None = None) -> None:
        """One fault, of any kind.

        Args:
            victim: the relay that it hits, if it hits one; by chance if not said.
        """
        if self._sim.settling:
            return
        self._victim = victim
        weights = [weight for weight, _ in self._kinds]
        ((_, kind),) = self._rng.choices(self._kinds, weights)
        what = kind()
        if what is not None:
            self._tell(what)

    def _tell(self, what: str) -> None:
        self._sim.tell(what)
        self.happened.append((self._sim.world.now, what))

    def _lasts_s(self) -> float:
        """Shorter or longer than a lease, or than several."""
        lease_s = self._sim.settings.lease_s
        return lease_s * self._rng.choice((0.1, 0.5, 0.9, 1.1, 2.0, 4.0)) * self._rng.random() * 1.5

    def _trouble(self, whom: Process | None, for_s: float = 0.0) -> None:
        self._sim.fleet.trouble(whom, for_s)

    def _relay(self) -> Process | None:
        if self._victim is not None and not self._victim.dead and self._rng.random() < 0.8:
            return self._victim
        return self._sim.fleet.any_relay(self._rng)

    # ---------------------------------------------------------------- relays

    def kill_relay(self) -> str | None:
        """kill -9, and somebody starts it again later."""
        relay = self._relay()
        if relay is None:
            return None
        back_s = self._rng.choice((0.0, 0.5, self._lasts_s(), self._lasts_s()))
        self._trouble(relay, back_s)
        self._sim.fleet.kill(relay, back_s)
        return f"{relay.name} is killed, back in {back_s:.1f} s"

    def freeze_relay(self) -> str | None:
        """SIGSTOP … SIGCONT."""
        relay = self._relay()
        if relay is None or relay.frozen:
            return None
        for_s = self._lasts_s()
        self._trouble(relay, for_s)
        self._sim.fleet.freeze(relay, for_s)
        return f"{relay.name} is frozen for {for_s:.1f} s"

    def restart_relay(self) -> str | None:
        """SIGTERM, and a new one at once, or later."""
        relay = self._relay()
        if relay is None or relay.frozen:
            return None
        self._sim.fleet.trouble(relay, self._sim.settings.drain_s, harm=False)
        self._sim.fleet.stop(relay, self._rng.choice((0.0, self._lasts_s())))
        return f"{relay.name} is told to stop"

    # -------------------------------------------------------------- database

    def restart_database(self) -> str | None:
        """restart -m immediate."""
        for_s = self._rng.choice((0.2, 1.0, self._lasts_s()))
        self._trouble(None, for_s)
        self._sim.crash_database(for_s)
        return f"the database crashes for {for_s:.1f} s"

    def terminate_backends(self) -> str | None:
        """pg_terminate_backend of one session of a relay, or of many."""
        db = self._sim.database
        found = [b for b in db.backends.values() if b.name.startswith("outbox-relay")]
        if not found:
            return None
        few = self._rng.random() < 0.7
        chosen = (
            [self._rng.choice(found)] if few else [b for b in found if self._rng.random() < 0.7]
        )
        self._trouble(None)
        for backend in chosen:
            backend.terminate()
        return f"{len(chosen)} sessions are ended: {', '.join(b.name for b in chosen[:3])}"

    def stall_backends(self) -> str | None:
        """The server's process for one session of a relay, or for all, gets no further."""
        db = self._sim.database
        relay = self._relay()
        found = [c for c in db.connections if c.process is relay and c.name.startswith("outbox")]
        backends = [c.backend for c in found if c.backend is not None and c.backend.alive]
        if not backends:
            return None
        for_s = self._lasts_s()
        self._trouble(None, for_s)
        chosen = backends if self._rng.random() < 0.5 else [self._rng.choice(backends)]
        for backend in chosen:
            backend.stalled_until = self._sim.world.now + for_s
        return f"{len(chosen)} sessions of {chosen[0].name} stall for {for_s:.1f} s"

    def cut_connection(self) -> str | None:
        """Reset, on the way."""
        connection = self._sim.any_connection(self._rng)
        if connection is None:
            return None
        self._trouble(connection.process)
        connection.cut()
        return f"a connection of {connection.name} is cut"

    def hang_connection(self) -> str | None:
        """Half-open: nothing arrives any more, and nobody is told."""
        connection = self._sim.any_connection(self._rng)
        if connection is None:
            return None
        return self._hang(connection, half_asked=self._rng.random() < 0.5)

    def hang_in_transaction(self, victim: Process) -> None:
        """The same of a connection that has locks, if there is one, between two halves of
        a question."""
        found = [
            each
            for each in self._sim.database.connections
            if each.process is victim
            and each.backend is not None
            and each.backend.transaction is not None
        ]
        if found and not self._sim.settling:
            self._tell(self._hang(self._rng.choice(found), half_asked=True))

    def _hang(self, connection: Connection, *, half_asked: bool) -> str:
        self._trouble(connection.process)
        # It may be found out only when something is to be recorded.
        self._sim.checker.harmed_until = math.inf
        # Where nobody may end a session it would have its locks for ever.
        half_asked = half_asked and self._sim.database.signals
        connection.hang(half_asked=half_asked)
        return f"a connection of {connection.name} hangs{', having half asked' * half_asked}"

    def slow_network(self) -> str | None:
        """Everything between a relay and the database takes long."""
        relay = self._relay()
        if relay is None:
            return None
        for_s = self._lasts_s()
        network = self._sim.database.network_of(relay.name)
        network.usual_s = self._sim.settings.lease_s * self._rng.choice((0.005, 0.05, 0.2))
        self._trouble(relay, for_s)

        def heal() -> None:
            network.usual_s = 0.0005

        self._sim.heal(for_s, heal)
        return f"the network of {relay.name} is slow for {for_s:.1f} s"

    def stall_network(self) -> str | None:
        """Nothing gets through between a relay and the database; then all of it does."""
        relay = self._relay()
        if relay is None:
            return None
        for_s = self._lasts_s()
        self._trouble(relay, for_s)
        self._sim.database.network_of(relay.name).stalled_until = self._sim.world.now + for_s
        return f"the network of {relay.name} stalls for {for_s:.1f} s"

    def leave_alone(self) -> str | None:
        """What the database says comes late, then nothing gets through; receivers hang.

        So a lease may have been renewed long before the relay hears of it, and is lost
        while requests are open.
        """
        relay = self._relay()
        if relay is None:
            return None
        sim, now = self._sim, self._sim.world.now
        late_s, gone_s = self._lasts_s(), 1.5 * sim.settings.lease_s
        self._trouble(None, late_s + gone_s)
        network = sim.database.network_of(relay.name)
        network.answers_stalled_until = now + late_s
        for receiver in sim.receivers.values():
            receiver.hanging_until = now + late_s + gone_s

        def go() -> None:
            if not sim.settling:
                network.stalled_until = sim.world.now + gone_s

        sim.world.after(late_s + 0.1, None, go)
        return f"{relay.name} hears late for {late_s:.1f} s, then nothing for {gone_s:.1f} s"

    def shift_the_clock(self) -> str:
        """The database's clock jumps; it is the one that all relays go by."""
        by_s = self._rng.choice((-3600.0, -30.0, 30.0, 3600.0)) * self._rng.random()
        self._trouble(None)
        self._sim.database.skew_s += by_s
        return f"the database's clock jumps by {by_s:.0f} s"

    # ------------------------------------------------------------- receivers

    def receiver_down(self) -> str | None:
        """Refuses connections."""
        receiver = self._sim.any_receiver(self._rng)
        for_s = self._lasts_s()
        receiver.down_until = self._sim.world.now + for_s
        return f"{receiver.name} is down for {for_s:.1f} s"

    def receiver_hangs(self) -> str | None:
        """Accepts, and never answers."""
        receiver = self._sim.any_receiver(self._rng)
        for_s = self._lasts_s()
        receiver.hanging_until = self._sim.world.now + for_s
        return f"{receiver.name} hangs for {for_s:.1f} s"

    def receiver_busy(self) -> str | None:
        """Answers 429 with Retry-After."""
        receiver = self._sim.any_receiver(self._rng)
        for_s = self._lasts_s()
        receiver.busy_until = self._sim.world.now + for_s
        return f"{receiver.name} is busy for {for_s:.1f} s"
