"""What a run is going to do: its size, its faults and when each begins.

Everything is drawn from the seed before the run begins, so a seed repeats the
faults; how the processes come through them is theirs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from outbox.errors import UsageError

CONNECTIONS_PER_RELAY = 10
"""Nine of a session, and one while it buries its predecessor."""
PRODUCERS, HOLDERS = 10, 2
"""Producers, and those among them who hold each transaction open for a while."""
CONTROL_CONNECTIONS = 4
EVENTS_MAX = 2_000_000
"""The books are kept in memory, some 400 bytes for each event."""
LANES = 2
"""Of each endpoint, in the beginning."""
KEYS_PER_ENDPOINT = 5
SETTLE_S_MIN = 90.0
SETTLE_SHARE = 1.0
"""A run may take as long again to deliver what the faults held up."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    name: str
    what: str
    group: str
    own_server: bool = False
    """Only for a server that nobody else uses."""


_RELAYS, _WAY, _DATABASE = "the relays", "their way to the database", "the database"
_RECEIVERS, _OPERATOR = "the receivers", "an operator"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill", "kill -9 of a relay, which is started again", _RELAYS),
        Kind("freeze", "SIGSTOP for longer than its lease, then SIGCONT", _RELAYS),
        Kind("stop", "SIGTERM and a new start, as in a deployment", _RELAYS),
        Kind("cut", "all connections of a relay are reset", _WAY),
        Kind("half-open", "its connections stay open, and nothing passes any more", _WAY),
        Kind("unreachable", "the database cannot be reached from one relay", _WAY),
        Kind("terminate", "pg_terminate_backend of one session of a relay", _DATABASE),
        Kind("terminate-listen", "the same of the session that LISTENs", _DATABASE),
        Kind("terminate-all", "the same of all sessions of all relays at once", _DATABASE),
        Kind("restart", "pg_ctl restart -m immediate (with --embedded)", _DATABASE, True),
        Kind("refuse", "nobody listens there", _RECEIVERS),
        Kind("hang", "no answer at all", _RECEIVERS),
        Kind("drip", "an answer byte by byte", _RECEIVERS),
        Kind("reset", "the connection is reset instead of an answer", _RECEIVERS),
        Kind("garbage", "an answer that is not HTTP", _RECEIVERS),
        Kind("half-answer", "an answer that breaks off", _RECEIVERS),
        Kind("endless", "200 with a body that does not end", _RECEIVERS),
        Kind("error", "500", _RECEIVERS),
        Kind("retry-after", "429 and 503 with Retry-After", _RECEIVERS),
        Kind("reject", "422 for good: dead letters", _RECEIVERS),
        Kind("lanes", "another number of lanes", _OPERATOR),
        Kind("pause", "pauses an endpoint, and resumes it", _OPERATOR),
        Kind("add", "adds an endpoint", _OPERATOR),
        Kind("replay", "replays all dead letters", _OPERATOR),
    )
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault that is going to be."""

    at_s: float
    """From the beginning of the run."""
    kind: str
    seed: int
    """Of everything else about it: whom it hits, and for how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for.

    Raises:
        UsageError: more events than the books can hold.
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
    """Where deliveries are passed on to; None: they end here."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.events > EVENTS_MAX:
            raise UsageError(
                f"{self.events:,} events are more than the {EVENTS_MAX:,} that the books can hold: "
                "lower --minutes or --rate"
            )

    @property
    def seconds(self) -> float:
        """How long the faults last."""
        return self.minutes * 60.0

    @property
    def events(self) -> int:
        """About so many events will be committed."""
        return round(self.seconds * self.rate)

    @property
    def schema(self) -> str:
        """The schema that the run makes for itself."""
        return f"outbox_prove_{self.seed}"

    @property
    def connections(self) -> int:
        """So many connections to the database at most: half-open ones count twice."""
        return self.replicas * CONNECTIONS_PER_RELAY * 2 + PRODUCERS + CONTROL_CONNECTIONS

    @property
    def settle_s(self) -> float:
        """After the faults everything must have ended within this time."""
        return max(SETTLE_S_MIN, SETTLE_SHARE * self.seconds)

    def schedule(self) -> list[Planned]:
        """The faults, in order.

        Kinds come as from a deck of cards, so that a short run sees as many of
        them as it can.
        """
        rng = random.Random(self.seed)  # noqa: S311 (a repeatable run is the point)
        planned: list[Planned] = []
        deck: list[str] = []
        for n in range(1, math.ceil(self.seconds / self.fault_every_s)):
            if not self.kinds:
                break
            if not deck:
                deck = rng.sample(self.kinds, len(self.kinds))
            planned.append(Planned(n * self.fault_every_s, deck.pop(), rng.getrandbits(32)))
        return planned


def choose(names: str | None, *, own_server: bool) -> tuple[str, ...]:
    """The kinds that a run may use.

    Args:
        names: with commas between them; None: all that are harmless here.
        own_server: nobody else uses the server.

    Raises:
        UsageError: there is no such kind, or it is not for a server of others.
    """
    if names is None:
        return tuple(k.name for k in KINDS.values() if own_server or not k.own_server)
    chosen = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    for name in chosen:
        if name not in KINDS:
            raise UsageError(f'there is no fault "{name[:40]}"; there are: {", ".join(KINDS)}')
        if KINDS[name].own_server and not own_server:
            raise UsageError(
                f'the fault "{name}" would hit everybody on that server: use --embedded for it'
            )
    return chosen
