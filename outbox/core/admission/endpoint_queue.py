"""Those who have turns: tenants, their endpoints' lines, and their lanes (see `turns`)."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum, StrEnum
from math import inf

from outbox.core.admission.fair_queue import LeastFirst
from outbox.core.admission.rate_limit import Rate


class Part(IntEnum):
    """Of the requests that may be open."""

    QUICK = 0
    NEW = 1
    SLOW = 2
    MOVED = 3
    """Nobody begins there."""


class Why(StrEnum):
    """What somebody waits for."""

    IN_FLIGHT = "endpoint_in_flight"
    """A request of the endpoint to end, which has as many as it may."""
    RATE = "endpoint_rate"
    TENANT_IN_FLIGHT = "tenant_in_flight"
    TENANT_RATE = "tenant_rate"
    QUICK = "quick"
    """Room in this part."""
    NEW = "new"
    SLOW = "slow"


class Tenant:
    """What the endpoints of one tenant have; or all those that have none."""

    __slots__ = (
        "bounded",
        "lines",
        "members",
        "name",
        "new",
        "open",
        "quick",
        "rate",
        "served_at",
        "slow",
        "waiting",
        "wake_at",
    )

    def __init__(self, name: str | None, rate_per_s: float | None) -> None:
        self.name = name
        # Those without a tenant are together for fairness alone.
        self.bounded = name is not None
        self.rate = None if rate_per_s is None else Rate(rate_per_s)
        # Requests: all of them, and by part; the new ones are quick ones, too.
        self.open = self.quick = self.new = self.slow = 0
        self.served_at = -inf
        # Lines of which somebody waits for room, by part.
        self.lines = (LeastFirst[Line](), LeastFirst[Line](), LeastFirst[Line]())
        self.members = 0
        self.waiting = 0
        self.wake_at: float | None = None


class Line:
    """One endpoint, and the lanes of it that wait."""

    __slots__ = (
        "in_flight_max",
        "new",
        "open",
        "part",
        "patient",
        "proven",
        "quick",
        "rate",
        "served_at",
        "slow",
        "slow_until",
        "tenant",
        "waiting",
        "wake_at",
    )

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.in_flight_max: int | None = None
        self.rate: Rate | None = None
        self.open = self.quick = self.new = self.slow = 0
        self.served_at = -inf
        # Its last answer was quick.
        self.proven = False
        self.slow_until = 0.0
        # So many of those that wait need a slow place.
        self.patient = 0
        self.waiting: OrderedDict[Turn, None] = OrderedDict()
        # Where it waits for room; None: it does not.
        self.part: Part | None = None
        self.wake_at: float | None = None


class Turn:
    """A lane's: one request at a time."""

    __slots__ = ("began_at", "called_off", "cut", "line", "open", "part", "waiting")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.waiting = self.open = False
        # Of the request that is open.
        self.called_off = False
        # So many times in a row it was moved, and then called off.
        self.cut = 0
        self.began_at = 0.0
        self.part = Part.QUICK


def holder_of(line: Line) -> Tenant | Line:
    """Who answers for its requests: its tenant, or itself where it has none."""
    return line.tenant if line.tenant.bounded else line
