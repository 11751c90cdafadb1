"""Admission control while the relay's own process lacks resources, and which failures those are."""

from __future__ import annotations

import errno

import pytest

from outbox.core.admission.endpoint_queue import Slot
from outbox.core.admission.open_requests import RECOVERY_S
from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.brokers.port import StopKind
from outbox.core.model.response import Failure
from outbox.destinations.broker_connection import stop_of
from outbox.network.errors import NotConnected, is_own_failure

IN_FLIGHT_MAX = 64


def open_slots(scheduler: RequestScheduler, number: int) -> list[Slot]:
    """Requests of as many endpoints, which all are admitted if there is room."""
    slots = [Slot(scheduler.add_endpoint(None, None, None)) for _ in range(number)]
    for slot in slots:
        scheduler.admit(slot, 0.0)
    return [slot for slot in slots if slot.open]


def fail(scheduler: RequestScheduler, slot: Slot, now: float) -> list[Slot]:
    scheduler.record_exhausted(slot, now)
    return scheduler.end(slot, now, responded=False)


def test_failures_together_lower_the_limit_once() -> None:
    scheduler = RequestScheduler(IN_FLIGHT_MAX)
    slots = open_slots(scheduler, 16)
    assert len(slots) == 16
    for slot in slots[:6]:
        assert fail(scheduler, slot, 0.0) == []
    assert scheduler.open_max == 7
    # Ten are open: none starts until fewer than the limit are.
    waiting = Slot(scheduler.add_endpoint(None, None, None))
    assert scheduler.admit(waiting, 0.0) == []
    for slot in slots[6:9]:
        assert scheduler.end(slot, 0.1) == []
    assert scheduler.end(slots[9], 0.1) == [waiting]


def test_the_limit_recovers_by_itself_and_a_single_request_is_tried_again() -> None:
    scheduler = RequestScheduler(IN_FLIGHT_MAX)
    (slot,) = open_slots(scheduler, 1)
    fail(scheduler, slot, 0.0)
    assert scheduler.open_max == 0
    now = 0.0
    for _ in range(3):
        # It is the only request: it waits, and does not spin.
        assert scheduler.admit(slot, now) == []
        wake_at = scheduler.wake_at()
        assert wake_at is not None
        assert wake_at >= now + RECOVERY_S / 2
        now = wake_at
        assert scheduler.wake(now) == [slot]
        fail(scheduler, slot, now)
        assert scheduler.open_max == 0
    assert scheduler.admit(slot, now) == []
    now += RECOVERY_S
    assert scheduler.wake(now) == [slot]
    scheduler.end(slot, now)
    # Later, and also after a time in which nothing waited, everything is as before.
    assert scheduler.admit(slot, now + 60.0) == [slot]
    assert scheduler.open_max == IN_FLIGHT_MAX


@pytest.mark.parametrize(
    ("error", "addresses", "is_own"),
    [
        (OSError(errno.EMFILE, "x"), [], True),
        (OSError(errno.ENFILE, "x"), [], True),
        (OSError(errno.ENOBUFS, "x"), [], True),
        (OSError(errno.ENOMEM, "x"), [], True),
        (MemoryError(), [], True),
        (OSError(errno.EADDRNOTAVAIL, "x"), ["192.0.2.1"], True),
        (OSError(errno.EADDRNOTAVAIL, "x"), ["2001:db8::1", "192.0.2.1"], True),
        # A host without IPv6: that is no lack of ports.
        (OSError(errno.EADDRNOTAVAIL, "x"), ["2001:db8::1"], False),
        (OSError(errno.ECONNREFUSED, "x"), ["192.0.2.1"], False),
        (OSError("Multiple exceptions"), ["192.0.2.1"], False),
        (TimeoutError(), ["192.0.2.1"], False),
    ],
)
def test_which_failures_are_our_own(
    error: BaseException, addresses: list[str], is_own: bool
) -> None:
    assert is_own_failure(error, addresses) == is_own


def test_a_broker_is_not_charged_either() -> None:
    stop = stop_of(NotConnected(Failure.LOCAL, "too many open files"))
    assert stop.kind is StopKind.LOCAL
