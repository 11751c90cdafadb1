"""State of admission control: tenants, endpoint queues, slots (see `request_scheduler`)."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum, StrEnum
from math import inf

from outbox.core.admission.fair_queue import FairQueue
from outbox.core.admission.rate_limit import RateLimit


class CapacityClass(IntEnum):
    """Capacity classes of open requests."""

    FAST = 0
    PROBATION = 1
    SLOW = 2
    OVERDUE = 3
    """Requests move here; none starts here."""


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


class Tenant:
    """Usage of a tenant's endpoints; one object stands for all endpoints without a tenant."""

    __slots__ = (
        "bounded",
        "fast",
        "members",
        "name",
        "open",
        "probation",
        "queues",
        "rate",
        "served_at",
        "slow",
        "waiting",
        "wake_at",
    )

    def __init__(self, name: str | None, rate_per_s: float | None) -> None:
        self.name = name
        # Endpoints without a tenant share this object for fairness only, not for limits.
        self.bounded = name is not None
        self.rate = None if rate_per_s is None else RateLimit(rate_per_s)
        # Open requests in all and by class; those on probation also count as fast.
        self.open = self.fast = self.probation = self.slow = 0
        self.served_at = -inf
        # By class, the endpoints with requests that wait for a slot.
        self.queues = (
            FairQueue[EndpointQueue](),
            FairQueue[EndpointQueue](),
            FairQueue[EndpointQueue](),
        )
        self.members = 0
        self.waiting = 0
        self.wake_at: float | None = None


class EndpointQueue:
    """One endpoint's usage and its waiting requests."""

    __slots__ = (
        "capacity_class",
        "fast",
        "holder",
        "in_flight_max",
        "known_fast",
        "open",
        "probation",
        "rate",
        "served_at",
        "slow",
        "slow_until",
        "slow_waiting",
        "tenant",
        "waiting",
        "wake_at",
    )

    def __init__(self, tenant: Tenant) -> None:
        self.set_tenant(tenant)
        self.in_flight_max: int | None = None
        self.rate: RateLimit | None = None
        self.open = self.fast = self.probation = self.slow = 0
        self.served_at = -inf
        # Its last response was fast.
        self.known_fast = False
        self.slow_until = 0.0
        # Number of waiting requests that need a slow slot.
        self.slow_waiting = 0
        self.waiting: OrderedDict[Slot, None] = OrderedDict()
        # The class whose slot it waits for; None: it does not wait for a slot.
        self.capacity_class: CapacityClass | None = None
        self.wake_at: float | None = None

    def set_tenant(self, tenant: Tenant) -> None:
        """Set the tenant, and with it the holder of the endpoint's capacity."""
        self.tenant = tenant
        self.holder: Tenant | EndpointQueue = tenant if tenant.bounded else self
        """Its tenant, or itself without one."""


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
