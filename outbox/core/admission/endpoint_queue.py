"""State of admission control: tenants, endpoint queues, slots (see `request_scheduler`)."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum, StrEnum
from math import inf

from outbox.core.admission.fair_queue import FairQueue
from outbox.core.admission.rate_limit import RESOLUTION_S, RateLimit


class CapacityClass(IntEnum):
    """Capacity classes of open requests."""

    FAST = 0
    PROBATION = 1
    SLOW = 2
    OVERDUE = 3
    """Requests move here; none starts here."""


# By name: Python 3.11 takes far longer to find the members of an enumeration.
FAST, PROBATION, SLOW, OVERDUE = CapacityClass
CLASSES = (FAST, PROBATION, SLOW)


class WaitReason(StrEnum):
    """Why a request waits: a reached limit, or no free slot in a class."""

    IN_FLIGHT = "endpoint_in_flight"
    """The endpoint has as many open requests as it may."""
    RATE = "endpoint_rate"
    TENANT_IN_FLIGHT = "tenant_in_flight"
    TENANT_RATE = "tenant_rate"
    FAST = "fast"
    """No free slot in this class."""
    PROBATION = "probation"
    SLOW = "slow"


class Usage:
    """Open requests, in all and by class: of an endpoint, a tenant or the relay."""

    __slots__ = ("fast", "open", "probation", "slow")

    def __init__(self) -> None:
        # Requests on probation also count as fast; overdue ones are in no class here.
        self.open = self.fast = self.probation = self.slow = 0

    def add(self, other: Usage, sign: int) -> None:
        """Add the requests of an endpoint (1), or subtract them (-1)."""
        self.open += sign * other.open
        self.fast += sign * other.fast
        self.probation += sign * other.probation
        self.slow += sign * other.slow

    def of_class(self, capacity_class: CapacityClass) -> int:
        """The usage of a class.  Fast requests do not count as probation ones, or a tenant that is
        always busy could never start a new endpoint.
        """
        if capacity_class is FAST:
            return self.fast
        return self.probation if capacity_class is PROBATION else self.slow


class LimitedUsage(Usage):
    """Usage with limits of its own.

    Args:
        in_flight_max: open requests; None: no limit.
        rate_per_s: requests started per second; None: no limit.
    """

    __slots__ = ("in_flight_max", "rate", "served_at", "wake_at")

    in_flight_reason: WaitReason
    rate_reason: WaitReason

    def __init__(self, in_flight_max: int | None, rate_per_s: float | None) -> None:
        super().__init__()
        self.in_flight_max = in_flight_max
        self.rate = None if rate_per_s is None else RateLimit(rate_per_s)
        self.served_at = -inf
        self.wake_at: float | None = None

    @property
    def is_limited(self) -> bool:
        """Whether it has limits of its own."""
        return self.in_flight_max is not None or self.rate is not None

    def limit_reached(self, now: float, held: int = 0) -> WaitReason | None:
        """The limit that is reached; None: none.

        Args:
            held: 1 if an open request ends when the next one starts.
        """
        if self.in_flight_max is not None and self.open - held >= self.in_flight_max:
            return self.in_flight_reason
        if self.rate is not None and not self.rate.ready(now):
            return self.rate_reason
        return None


class Tenant(LimitedUsage):
    """Usage of a tenant's endpoints; one object stands for all endpoints without a tenant."""

    __slots__ = ("bounded", "members", "name", "queues", "waiting")

    in_flight_reason, rate_reason = WaitReason.TENANT_IN_FLIGHT, WaitReason.TENANT_RATE

    def __init__(self, name: str | None, in_flight_max: int | None, rate: float | None) -> None:
        super().__init__(in_flight_max, rate)
        self.name = name
        # Endpoints without a tenant share this object for fairness only, not for limits.
        self.bounded = name is not None
        # By class, the endpoints with requests that wait for a slot.
        self.queues = (
            FairQueue[EndpointQueue](),
            FairQueue[EndpointQueue](),
            FairQueue[EndpointQueue](),
        )
        self.members = 0
        self.waiting = 0


class EndpointQueue(LimitedUsage):
    """One endpoint's usage and its waiting requests."""

    __slots__ = (
        "capacity_class",
        "holder",
        "known_fast",
        "slow_until",
        "slow_waiting",
        "tenant",
        "waiting",
    )

    in_flight_reason, rate_reason = WaitReason.IN_FLIGHT, WaitReason.RATE

    def __init__(self, tenant: Tenant, in_flight_max: int | None, rate_per_s: float | None) -> None:
        super().__init__(in_flight_max, rate_per_s)
        self.set_tenant(tenant)
        # Its last response was fast.
        self.known_fast = False
        self.slow_until = 0.0
        # Number of waiting requests that need a slow slot.
        self.slow_waiting = 0
        self.waiting: OrderedDict[Slot, None] = OrderedDict()
        # The class whose slot it waits for; None: it does not wait for a slot.
        self.capacity_class: CapacityClass | None = None

    def set_tenant(self, tenant: Tenant) -> None:
        """Set the tenant, and with it the holder of the endpoint's capacity."""
        self.tenant = tenant
        self.holder: Tenant | EndpointQueue = tenant if tenant.bounded else self
        """Its tenant, or itself without one."""

    def class_at(self, now: float) -> CapacityClass:
        """The class of its next request."""
        if self.open > self.fast or self.slow_waiting or now + RESOLUTION_S < self.slow_until:
            return SLOW
        return FAST if self.known_fast else PROBATION


class Slot:
    """A lane's slot: one request at a time."""

    __slots__ = (
        "capacity_class",
        "open",
        "preempted",
        "preempted_count",
        "queue",
        "started_at",
        "waiting",
    )

    def __init__(self, queue: EndpointQueue) -> None:
        self.queue = queue
        self.waiting = self.open = False
        # The open request is to be ended.
        self.preempted = False
        # Preemptions in a row while overdue.
        self.preempted_count = 0
        self.started_at = 0.0
        self.capacity_class = CapacityClass.FAST
