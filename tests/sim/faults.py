"""Faults: each is injected at a step of the run, and ends by itself.

A step is a callback, a message or a part of a statement, so a fault may strike between any
two of them, and strikes more often where more happens.
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


TRIES = 20
"""How often a fault waits for a moment at which the other relays are healthy."""


class Faults:
    """Injects faults into a simulation.

    Args:
        rng: chooses the kind, the relay and the duration.
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
            (2, self.isolate_relay),
            (1, self.shift_clock),
            (4, self.receiver_down),
            (2, self.receiver_hangs),
            (2, self.receiver_busy),
        ]

    def strike(self, victim: Process | None = None) -> None:
        """Inject a fault of a random kind.

        Args:
            victim: the relay for a fault of a relay; None: a random one.
        """
        if self._sim.settling:
            return
        self._victim = victim
        weights = [weight for weight, _ in self._kinds]
        ((_, kind),) = self._rng.choices(self._kinds, weights)
        what = kind()
        if what is not None:
            self.record(what)

    def record(self, what: str) -> None:
        """Record a fault that was injected."""
        self._sim.log(what)
        self.happened.append((self._sim.world.now, what))

    def _lasts_s(self) -> float:
        """A duration between a fraction and several times the lease."""
        lease_s = self._sim.settings.lease_s
        return lease_s * self._rng.choice((0.1, 0.5, 0.9, 1.1, 2.0, 4.0)) * self._rng.random() * 1.5

    def _trouble(self, relay: Process | None, for_s: float = 0.0) -> None:
        self._sim.fleet.trouble(relay, for_s)

    def _relay(self) -> Process | None:
        if self._victim is not None and not self._victim.dead and self._rng.random() < 0.8:
            return self._victim
        return self._sim.fleet.pick_live_relay(self._rng)

    # ---------------------------------------------------------------- relays

    def kill_relay(self) -> str | None:
        """SIGKILL; the relay is started again later."""
        relay = self._relay()
        if relay is None:
            return None
        back_s = self._rng.choice((0.0, 0.5, self._lasts_s(), self._lasts_s()))
        self._trouble(relay, back_s)
        self._sim.fleet.kill(relay, back_s)
        return f"{relay.name} is killed, back in {back_s:.1f} s"

    def freeze_relay(self) -> str | None:
        """SIGSTOP, later SIGCONT."""
        relay = self._relay()
        if relay is None or relay.frozen:
            return None
        for_s = self._lasts_s()
        self._trouble(relay, for_s)
        self._sim.fleet.freeze(relay, for_s)
        return f"{relay.name} is frozen for {for_s:.1f} s"

    def restart_relay(self) -> str | None:
        """SIGTERM; the relay is started again at once or later."""
        relay = self._relay()
        if relay is None or relay.frozen:
            return None
        self._sim.fleet.trouble(relay, self._sim.settings.drain_s, harm=False)
        self._sim.fleet.stop(relay, self._rng.choice((0.0, self._lasts_s())))
        return f"{relay.name} is stopped"

    # -------------------------------------------------------------- database

    def restart_database(self) -> str | None:
        """Crash the server, as `pg_ctl restart -m immediate` does."""
        for_s = self._rng.choice((0.2, 1.0, self._lasts_s()))
        self._trouble(None, for_s)
        self._sim.crash_database(for_s)
        return f"the database crashes for {for_s:.1f} s"

    def terminate_backends(self) -> str | None:
        """Terminate one session of a relay, or many (pg_terminate_backend)."""
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
        """Stall the server's process of one session of a relay, or of all."""
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
        """Reset a connection."""
        connection = self._sim.any_connection(self._rng)
        if connection is None:
            return None
        self._trouble(connection.process)
        connection.cut()
        return f"a connection of {connection.name} is cut"

    def hang_connection(self) -> str | None:
        """Make a connection half-open: nothing arrives, and neither side sees an error."""
        connection = self._sim.any_connection(self._rng)
        if connection is None:
            return None
        return self._hang(connection, half_sent=self._rng.random() < 0.5)

    def disconnect_operator(self, connection: Connection) -> None:
        """Make the connection of an operator half-open, or reset it.

        No other session waits for it, so no check is suspended.
        """
        if self._sim.settling or connection.is_closed():
            return
        if self._rng.random() < 0.7:
            connection.hang()
            self.record("a connection of an operator hangs")
        else:
            connection.cut()
            self.record("a connection of an operator is cut")

    def hang_while_writing(self, connection: Connection) -> None:
        """Make a connection half-open, after half of its next message has arrived."""
        if not self._sim.settling and not connection.is_closed():
            self.record(self._hang(connection, half_sent=True))

    def terminate_session(self, connection: Connection) -> None:
        """Terminate a session (pg_terminate_backend)."""
        if connection.backend is not None and not self._sim.settling:
            self._trouble(connection.process)
            connection.backend.terminate()
            self.record(f"a session of {connection.name} is ended")

    def orphan_statement(self, connection: Connection) -> None:
        """Stall a session in a statement, and kill or freeze its relay.

        The server executes a statement to its end after its client has died, so it may
        continue after another relay has claimed the endpoints.  If it has locked its fence,
        the relay cannot be expired before the session is terminated.
        """
        relay, backend = connection.process, connection.backend
        if self._sim.settling or relay.dead or relay.frozen or backend is None:
            return
        for_s = self._sim.settings.lease_s * self._rng.uniform(1.2, 4.0)
        # The session is terminated when its relay is expired, so that no other one waits for it.
        self._trouble(relay if self._sim.database.signals else None, for_s)
        backend.stalled_until = self._sim.world.now + for_s
        if self._rng.random() < 0.5:
            self._sim.fleet.kill(relay, self._rng.choice((0.0, for_s, for_s)))
        else:
            self._sim.fleet.freeze(relay, for_s * self._rng.choice((0.9, 1.2)))
        what = "is killed" if relay.dead else "is frozen"
        self.record(f"{relay.name} {what}, and its statement stalls for {for_s:.1f} s")

    def hold_rows(self, tries: int = TRIES) -> None:
        """Lock rows of one endpoint in a stranger's transaction, and kill the endpoint's owner.

        The other replicas claim the rest of its endpoints.  That is checked if they are healthy,
        so this waits until they are.

        Args:
            tries: how often to wait for it.
        """
        sim, db, rng = self._sim, self._sim.database, self._rng
        if sim.settling:
            return
        relay = self._relay()
        owned = [
            row["endpoint_id"]
            for row in db.ownership.rows.values()
            if relay is not None and sim.checker.owns(relay, row["replica_id"])
        ]
        if tries and (relay is None or len(owned) < 2 or not sim.fleet.successors_of(relay)):
            again_s = sim.settings.lease_s * rng.random()
            sim.world.after(again_s, None, self.hold_rows, tries - 1)
            return
        if relay is None or relay.frozen or not owned:
            return
        held = rng.choice(owned)
        for_s = sim.settings.lease_s * rng.uniform(2.0, 4.0)
        self._trouble(relay, for_s)
        sim.operator_process.run(sim.hold_rows_of(held, for_s))
        sim.fleet.kill(relay, for_s, held)
        self.record(
            f"{relay.name} is killed, and rows of an endpoint of it are locked for {for_s:.1f} s"
        )

    def _hang(self, connection: Connection, *, half_sent: bool) -> str:
        # The relay loses its session when it uses the connection, maybe much later.
        self._trouble(connection.process)
        connection.add_termination_listener(lambda hung: self._trouble(hung.process))
        # The relay may notice it only when it records something.
        self._sim.checker.harmed_until = math.inf
        connection.hang(half_sent=half_sent)
        return f"a connection of {connection.name} hangs{', after half a statement' * half_sent}"

    def slow_network(self) -> str | None:
        """Slow down the network between a relay and the database."""
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
        """Delay all messages between a relay and the database; none is lost."""
        relay = self._relay()
        if relay is None:
            return None
        for_s = self._lasts_s()
        self._trouble(relay, for_s)
        self._sim.database.network_of(relay.name).stalled_until = self._sim.world.now + for_s
        return f"the network of {relay.name} stalls for {for_s:.1f} s"

    def isolate_relay(self) -> str | None:
        """Isolate a relay while it may have open requests."""
        relay = self._relay()
        return None if relay is None else self._isolate(relay)

    def isolate_sender(self, victim: Process) -> None:
        """Isolate a relay that has just sent a request, which gets no response."""
        if not self._sim.settling and not victim.dead:
            self.record(self._isolate(victim))

    def _isolate(self, relay: Process) -> str:
        """Delay the database's results, then all messages, while the receivers hang.

        So the result of a renewal may arrive long after the renewal, and the lease expires
        while requests are open.
        """
        sim, rng, now = self._sim, self._rng, self._sim.world.now
        lease_s = sim.settings.lease_s
        # A shorter delay is hidden by the time between two polls of the other relays; after a
        # longer one the lease has expired.
        late_s = lease_s * rng.uniform(0.3, 0.8) if rng.random() < 0.8 else self._lasts_s()
        outage_s = 1.5 * lease_s
        self._trouble(None, late_s + outage_s)
        network = sim.database.network_of(relay.name)
        network.responses_stalled_until = now + late_s
        for receiver in sim.receivers.values():
            receiver.hanging_until = now + late_s + outage_s

        def begin_outage() -> None:
            if not sim.settling:
                network.stalled_until = sim.world.now + outage_s

        sim.world.after(late_s + 0.1, None, begin_outage)
        return f"{relay.name} gets results late for {late_s:.1f} s, then none for {outage_s:.1f} s"

    def shift_clock(self) -> str:
        """Shift the database's clock, which all relays use."""
        by_s = self._rng.choice((-3600.0, -30.0, 30.0, 3600.0)) * self._rng.random()
        self._trouble(None)
        self._sim.database.skew_s += by_s
        return f"the database's clock jumps by {by_s:.0f} s"

    # ------------------------------------------------------------- receivers

    def receiver_down(self) -> str | None:
        """Let a receiver refuse connections."""
        receiver = self._sim.any_receiver(self._rng)
        for_s = self._lasts_s()
        receiver.down_until = self._sim.world.now + for_s
        return f"{receiver.name} is down for {for_s:.1f} s"

    def receiver_hangs(self) -> str | None:
        """Let a receiver accept requests and never respond."""
        receiver = self._sim.any_receiver(self._rng)
        for_s = self._lasts_s()
        receiver.hanging_until = self._sim.world.now + for_s
        return f"{receiver.name} hangs for {for_s:.1f} s"

    def receiver_busy(self) -> str | None:
        """Let a receiver respond 429 with Retry-After."""
        receiver = self._sim.any_receiver(self._rng)
        for_s = self._lasts_s()
        receiver.busy_until = self._sim.world.now + for_s
        return f"{receiver.name} is busy for {for_s:.1f} s"
