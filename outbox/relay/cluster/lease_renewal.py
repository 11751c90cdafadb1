"""Renewal of a replica's lease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.core.cluster.observed_time import OdometerAdder
from outbox.store.cluster.replicas import Renewal
from outbox.store.errors import Fenced, ResponseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from outbox.core.cluster.lease import Lease
    from outbox.core.cluster.observed_time import Odometer
    from outbox.store.cluster.replicas import ReplicaStore

T = TypeVar("T")

LOST_WAITS = 2
"""Intervals between two renewals after which the connection of one without a response is taken for
lost, while there is time for another one."""
ADDITION_RENEWALS_MAX = 2
"""Maximum of one addition to the odometer, in intervals between two renewals: one that was late."""


async def keep_lease(
    store: ReplicaStore,
    replica_id: int,
    lease: Lease,
    odometer: Odometer,
    clock: Callable[[], float],
    on_time: Callable[[float, float, float], None],
    reconnect: Callable[[], bool],
    *,
    durable: bool,
) -> None:
    """Renew the lease and read the odometer until cancelled, on a connection used for nothing else.

    The lease is checked at every wake-up, by its own clock.  The loop's timers may have
    stopped while the machine was suspended, so no single wait is longer than the time
    between two renewals: requests in flight are closed at most that long after a resume.

    Args:
        clock: seconds of the steady clock.
        on_time: called with the database's time in epoch seconds, and the steady times
            of the request and the response.
        reconnect: opens another connection if it can.
        durable: whether renewals wait for the disk.

    Raises:
        Fenced: the lease expired; requests in flight must be closed.
    """

    def wait_s() -> float:
        left_s = lease.left_s(clock())
        if left_s <= 0:
            raise Fenced
        return min(left_s, lease.renew_every_s)

    async def within_lease(statement: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(statement)
        try:
            # `wait_s` also runs before it starts: an expired lease is not renewed.
            waits = 0
            while not (await asyncio.wait([task], timeout=wait_s()))[0]:
                waits += 1
                if waits == LOST_WAITS:
                    reconnect()
        finally:
            task.cancel()
        return task.result()

    addition_max_s = ADDITION_RENEWALS_MAX * lease.renew_every_s
    adder = OdometerAdder(addition_max_s)
    lost = False
    while True:
        if not lost:
            await asyncio.sleep(wait_s())
        started_at = clock()
        addition_s = adder.addition_s(started_at)
        try:
            renewal = await within_lease(store.renew(replica_id, addition_s, durable=durable))
        except ResponseLost:
            # Whether its addition was counted is unknown: count from the next response on.
            adder, lost = OdometerAdder(addition_max_s), True
            continue
        lost = False
        if renewal is Renewal.FENCED:
            raise Fenced
        lease.renewed(started_at)
        # A message that writes returns no time.
        asked_at = clock()
        adder.renewed(started_at, asked_at, adds=renewal is Renewal.ADDER)
        reading = await within_lease(store.read_clock(odometer.marked_s))
        odometer.update(reading.observed_s, reading.marks)
        on_time(reading.now, asked_at, clock())
