"""Plan of a chaos run: its events and endpoints, its faults and their times, and its checks.

Everything is drawn from the seed before the run, so a seed reproduces the faults, though not
the scheduling of the processes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

CONNECTIONS_PER_RELAY = 10
"""Nine per session, and one while it expires its predecessor."""
PRODUCERS, LONG_TRANSACTION_PRODUCERS = 10, 2
"""Producers, and how many of them hold each transaction open for a while."""
CONTROL_CONNECTIONS = 4
HUNG_COMMANDS_MAX = 8
"""Frozen and silent commands of operators at a time; a further one ends the oldest."""
PLANNED_EVENTS_MAX = 2_000_000
"""The ledger is kept in memory, about 400 bytes per event."""
RELAY_DRAIN_S = 3
"""Time in which a relay finishes its requests before it hands endpoints over."""
LANES = 2
"""Initial number of lanes of each endpoint."""
KEYS_PER_ENDPOINT = 5
HOLD_S_MAX = 3.0
"""How long some producers hold a transaction open, so that lower ids commit late."""
SETTLE_S_MIN = 90.0
SETTLE_SHARE = 1.0
"""Settling time as a share of the fault phase."""
CHECKS = {
    "lost": "committed, neither delivered nor a dead letter",
    "phantoms": "delivered, but never committed, or not for this endpoint",
    "inverted": "an older version or a lower sequence number arrived after a newer one",
    "snapshots": "from a position, an event that the snapshot saw, or none that it did not see",
    "holes": "a sequence number of a lane, neither delivered nor a dead letter",
    "changed": "a copy that differs, or an event with two sequence numbers",
    "previous": "a wrong previous_sequence",
    "overtaken": "sent before the previous number was acknowledged or dead-lettered",
    "doubled": "a second request of a lane while the first was open and its sender healthy",
    "unexplained": "a copy that no fault explains",
    "rejected": "not signed, or not a delivery",
    "overdue": "pending for three leases after the bounds of all faults had passed",
    "died": "a relay that exited without a fault",
    "proof_aborts": "a committed event that was about to be declared absent",
    "unsettled": "still pending at the end of the settling time",
    "verify": "found by outbox verify in the tables",
}
"""All checks, with the meaning of a violation."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault."""

    name: str
    description: str
    group: str
    own_server: bool = False
    """Whether the fault is allowed only on a server of its own, because it affects all users."""


FROZEN_LEASES = {"freeze": (1.3, 2.5), "freeze-long": (3.2, 4.5)}
"""How long a relay is frozen: the shortest and the longest duration, in leases."""
DOWN_LEASES_MAX = 3.0
"""How long all relays are down at most."""
_RELAYS, _CONNECTIONS, _DATABASE = "the relays", "their connections to the database", "the database"
_RECEIVERS, _OPERATOR = "the receivers", "an operator"
_COMMANDS = "a command of an operator: pause, resume, lanes, dead replay or apply"

FAULT_KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "kill -9 of a relay, which is restarted", _RELAYS),
        FaultKind("freeze", "SIGSTOP for longer than its lease, then SIGCONT", _RELAYS),
        FaultKind("freeze-long", "SIGSTOP for longer than three leases, then SIGCONT", _RELAYS),
        FaultKind("stop", "SIGTERM and a restart, as in a deployment", _RELAYS),
        FaultKind("down", "kill -9 of all relays, which are restarted later", _RELAYS),
        FaultKind("cut", "all connections of a relay are reset", _CONNECTIONS),
        FaultKind("half-open", "its connections stay open but pass no data", _CONNECTIONS),
        FaultKind("half-sent", "one stops in the middle of a statement, for good", _CONNECTIONS),
        FaultKind("unreachable", "the database cannot be reached from one relay", _CONNECTIONS),
        FaultKind("terminate", "pg_terminate_backend of one session of a relay", _DATABASE),
        FaultKind("terminate-listen", "the same for the LISTEN session", _DATABASE),
        FaultKind("terminate-all", "the same for all sessions of all relays at once", _DATABASE),
        FaultKind("restart", "pg_ctl restart -m immediate (with --embedded)", _DATABASE, True),
        FaultKind("refuse", "connection refused", _RECEIVERS),
        FaultKind("hang", "no response at all", _RECEIVERS),
        FaultKind("drip", "a response byte by byte", _RECEIVERS),
        FaultKind("reset", "the connection is reset instead of a response", _RECEIVERS),
        FaultKind("garbage", "a response that is not HTTP", _RECEIVERS),
        FaultKind("half-response", "a truncated response", _RECEIVERS),
        FaultKind("endless", "200 with a body that does not end", _RECEIVERS),
        FaultKind("error", "500", _RECEIVERS),
        FaultKind("retry-after", "429 and 503 with Retry-After", _RECEIVERS),
        FaultKind("reject", "422 permanently: dead letters", _RECEIVERS),
        FaultKind("lanes", "another number of lanes", _OPERATOR),
        FaultKind("pause", "pauses an endpoint, and resumes it", _OPERATOR),
        FaultKind("add", "adds an endpoint", _OPERATOR),
        FaultKind("snapshot", "adds an endpoint at the position of a snapshot", _OPERATOR),
        FaultKind("replay", "replays all dead letters", _OPERATOR),
        FaultKind("half-command", "its connection stops in the middle, for good", _COMMANDS),
        FaultKind("freeze-command", "SIGSTOP at a random message, for good", _COMMANDS),
        FaultKind("kill-command", "SIGKILL at a random message", _COMMANDS),
    )
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A scheduled fault."""

    at_s: float
    """Seconds from the start of the run."""
    kind: str
    seed: int
    """Seed of its random choices: targets and duration."""


@dataclass(frozen=True, slots=True)
class PlannedEndpoint:
    """An endpoint of a run, and how its receiver responds."""

    name: str
    pattern: str
    """Its subscription."""
    types: frozenset[int]
    """Numbers of the event types that match the pattern."""
    lanes: int = LANES
    fail_share: float = 0.0
    """Share of requests that fail at random."""
    rejects: int = 0
    """The receiver rejects this many events permanently, the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """Options of a run, and what is published to which endpoints.

    By default each endpoint has its own event type and its own keys.

    Raises:
        UsageError: more events than the ledger can hold.
    """

    minutes: float = 1.0
    replicas: int = 3
    rate: float = 1000.0
    """Events per second."""
    endpoints: int = 200
    fault_every_s: float = 3.0
    lease_s: float = 2.0
    kinds: tuple[str, ...] = ()
    receiver: str | None = None
    """URL to forward deliveries to; None: the run responds itself."""
    seed: int = 0
    events_max: int = PLANNED_EVENTS_MAX
    """The load ends after this many committed events at the latest."""
    hold_s_max: float = HOLD_S_MAX
    killed_leases_max: float = 1.5
    """A killed relay is restarted within this many leases."""
    major: int | None = None
    """Major version of an embedded PostgreSQL; None: the newest."""
    checks: Collection[str] = tuple(CHECKS)
    """The checks whose violations count."""

    def __post_init__(self) -> None:
        if self.events > PLANNED_EVENTS_MAX:
            raise UsageError(
                f"{self.events:,} events are more than the maximum of {PLANNED_EVENTS_MAX:,}: "
                "lower --minutes or --rate"
            )

    @property
    def seconds(self) -> float:
        """Duration of the fault phase, in seconds."""
        return self.minutes * 60.0

    @property
    def events(self) -> int:
        """Expected number of committed events."""
        return round(self.seconds * self.rate)

    @property
    def load_s(self) -> float:
        """Duration of the load, in seconds."""
        return self.seconds

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.endpoints * KEYS_PER_ENDPOINT

    def types_of(self, key: int) -> Sequence[int]:
        """Return the numbers of the event types that a key occurs with."""
        return (key // KEYS_PER_ENDPOINT,)

    def type_name(self, number: int) -> str:
        """Return the name of an event type."""
        return f"e{number}.changed"

    def endpoint(self, number: int) -> PlannedEndpoint:
        """Return an endpoint."""
        return PlannedEndpoint(f"e{number}", f"e{number}.*", frozenset({number}))

    @property
    def schema(self) -> str:
        """Name of the run's own schema."""
        return f"outbox_prove_{self.seed}"

    @property
    def connections(self) -> int:
        """Maximum number of database connections; half-open ones count twice."""
        relays = self.replicas * CONNECTIONS_PER_RELAY * 2
        return relays + PRODUCERS + CONTROL_CONNECTIONS + HUNG_COMMANDS_MAX + 1

    @property
    def settle_s(self) -> float:
        """Time-out for all deliveries to end after the faults, in seconds."""
        return max(SETTLE_S_MIN, SETTLE_SHARE * self.seconds)

    def schedule(self) -> list[PlannedFault]:
        """Return the faults, in order of time.

        Kinds are drawn without replacement, so that a short run covers as many as possible.
        """
        rng = random.Random(self.seed)  # noqa: S311 (a repeatable run is the point)
        planned: list[PlannedFault] = []
        remaining: list[str] = []
        for n in range(1, math.ceil(self.seconds / self.fault_every_s)):
            if not self.kinds:
                break
            if not remaining:
                remaining = rng.sample(self.kinds, len(self.kinds))
            planned.append(
                PlannedFault(n * self.fault_every_s, remaining.pop(), rng.getrandbits(32))
            )
        return planned


def select_faults(names: str | None, *, own_server: bool) -> tuple[str, ...]:
    """Select the kinds of faults of a run.

    Args:
        names: comma-separated; None: all that are allowed.
        own_server: the server has no other users.

    Raises:
        UsageError: an unknown kind, or one that needs a server of its own.
    """
    if names is None:
        return tuple(k.name for k in FAULT_KINDS.values() if own_server or not k.own_server)
    chosen = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    for name in chosen:
        if name not in FAULT_KINDS:
            raise UsageError(
                f'there is no fault "{name[:40]}"; there are: {", ".join(FAULT_KINDS)}'
            )
        if FAULT_KINDS[name].own_server and not own_server:
            raise UsageError(
                f'the fault "{name}" would affect all users of that server: use --embedded'
            )
    return chosen
