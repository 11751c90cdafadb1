"""The diagnosis of a trace: each cause alone, and their order."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outbox.core.delivery.circuit_breaker import NO_PROBING_TEXT, PROBING_TEXT
from outbox_doctor.trace.diagnosis import add_diagnosis
from outbox_doctor.trace.model import (
    EventTrace,
    LaneHead,
    PendingLaneState,
    SequencedBatch,
    SequencingProgress,
    TracedDeadLetter,
    TracedDelivery,
    TracedEvent,
    UnsentGroup,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENT = TracedEvent(
    outbox_id=17,
    event_id=UUID(int=1),
    type="order.paid",
    tenant=None,
    key="order-17",
    published_at=NOW - timedelta(hours=3),
    expires_at=None,
    headers=None,
    payload_bytes=12,
    content_type=None,
    erased_at=None,
)
STANDING = PendingLaneState(
    state="active",
    state_at=NOW - timedelta(days=2),
    state_by=None,
    state_comment=None,
    health="healthy",
    health_since=NOW - timedelta(days=2),
    held_until=None,
    relay="relay-1",
    head=LaneHead(
        sequence=5,
        event_id=EVENT.event_id,
        attempts=0,
        probes=0,
        next_attempt_at=None,
        last_response=None,
    ),
    failing_lanes=1,
    probes=True,
    blocked_since=None,
    blocked_by=None,
    older_pending=0,
    older_unended=0,
)
DELIVERY = TracedDelivery(
    endpoint="bill ing",
    endpoint_id=UUID(int=2),
    lane="l-1-0",
    sequence=5,
    delivery_id=UUID(int=3),
    sequenced_at=NOW,
    replay_of=None,
    backfill=None,
    attempts=(),
    dead_letter=None,
    lane_state=STANDING,
)
LETTER = TracedDeadLetter(
    id=9, reason="refused", state="dead", at=NOW, attempts=1, sequence=5, to_sequence=5
)
WHERE = "bill ing: sequence 5 of lane l-1-0 "


def trace(*deliveries: TracedDelivery, **more: Any) -> EventTrace:
    values: dict[str, Any] = {
        "at": NOW,
        "event": EVENT,
        "sequenced": SequencedBatch(3, NOW, late=False),
        "sequencing": None,
        "log_dropped": False,
        "deliveries": deliveries,
        "deliveries_total": len(deliveries),
        "missed": (),
    }
    return add_diagnosis(EventTrace(**values | more))


def pending(**changes: Any) -> list[str]:
    """The causes of a pending delivery, without its lane."""
    delivery = replace(DELIVERY, lane_state=replace(STANDING, **changes))
    reported = trace(delivery).diagnosis
    assert all(sentence.startswith(WHERE) for sentence in reported)
    return [sentence.removeprefix(WHERE) for sentence in reported]


def test_a_completed_delivery_needs_no_explanation() -> None:
    done = replace(DELIVERY, lane_state=None)
    assert done.state == "delivered"
    assert trace(done).diagnosis == ()


@pytest.mark.parametrize(
    ("sequencing", "says"),
    [
        (SequencingProgress(16, False, 0, None), "no relay is running; start one: outbox relay"),
        (SequencingProgress(20, True, 1, "r"), "because it committed late"),
        (SequencingProgress(15, False, 1, "r"), "leader r is 2 ids behind"),
        (SequencingProgress(15, False, 1, None), "no relay leads"),
    ],
)
def test_an_unsequenced_event_is_explained(sequencing: SequencingProgress, says: str) -> None:
    (reported,) = trace(sequenced=None, sequencing=sequencing).diagnosis
    assert says in reported


def test_an_event_without_subscribers_is_explained() -> None:
    missed = (UnsentGroup("type", 3, ("a", "b", "c")), UnsentGroup("filter", 1, ("d",)))
    (reported,) = trace(missed=missed).diagnosis
    assert reported == (
        "no endpoint received it: 3 not subscribed to its type (a, b, c); "
        "1 with a filter that excludes its payload (d)"
    )


def test_inconsistent_rows_are_reported() -> None:
    (reported,) = trace(
        replace(DELIVERY, lane_state=None), missed=(UnsentGroup("lost", 1, ("a",)),)
    ).diagnosis
    assert reported == "it was not sent to 1 that should have received it: run outbox verify (a)"


def test_an_event_beyond_the_log_retention_is_explained() -> None:
    (reported,) = trace(sequenced=None, log_dropped=True).diagnosis
    assert "retention dropped the log of its deliveries" in reported


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            "was dead-lettered because its receiver refused it; it is dead letter 9: "
            "outbox dead replay 9",
        ),
        (
            {"reason": "erased"},
            "was dead-lettered because its event was erased; it is dead letter 9",
        ),
        (
            {"state": "discarded"},
            "was dead-lettered because its receiver refused it; dead letter 9 was discarded",
        ),
        (
            {"state": "replaying", "reason": "exhausted"},
            "was dead-lettered because its retries were exhausted; it is being replayed",
        ),
    ],
)
def test_a_dead_letter_is_explained(changes: dict[str, Any], says: str) -> None:
    dead = replace(DELIVERY, lane_state=None, dead_letter=replace(LETTER, **changes))
    assert trace(dead).diagnosis == (WHERE + says,)


@pytest.mark.parametrize("state", ["replayed", "dead_again"])
def test_a_replayed_delivery_is_explained_by_its_replay(state: Any) -> None:
    dead = replace(DELIVERY, lane_state=None, dead_letter=replace(LETTER, state=state))
    assert dead.state == state
    assert trace(dead).diagnosis == ()


HEAD = STANDING.head


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ["is about to be sent"]),
        (
            {"state": "paused", "state_by": "ann@host", "state_comment": "migration"},
            [
                "waits: its endpoint has been paused by ann@host for 2d (migration); "
                "outbox endpoint resume 'bill ing'"
            ],
        ),
        ({"state": "removing"}, ["waits: its endpoint has been removing for 2d"]),
        (
            {"relay": None},
            ["waits: no live relay owns its endpoint; see outbox status"],
        ),
        (
            {"blocked_since": NOW - timedelta(minutes=5), "blocked_by": 8},
            [
                "waits: its lane has been blocked by dead letter 8 for 5m; unblock it: "
                "outbox dead replay 8, outbox dead discard 8 or outbox endpoint resume 'bill ing'"
            ],
        ),
        (
            {"older_pending": 4},
            [
                "waits for 4 pending deliveries in lanes of an older generation, to be "
                "delivered first"
            ],
        ),
        (
            {"older_unended": 2},
            ["waits for the end entry of 2 lanes of an older generation; see outbox status"],
        ),
        (
            {"held_until": NOW + timedelta(seconds=90), "health": "failing"},
            ["waits 1m 30s more: its receiver sent Retry-After"],
        ),
        (
            {"health": "rejecting"},
            [f"waits: its endpoint has been rejecting for 2d; {PROBING_TEXT}"],
        ),
        (
            {"health": "failing", "relay": None},
            [
                "waits: no live relay owns its endpoint; see outbox status",
                "waits: its endpoint has been failing for 2d",
            ],
        ),
        (
            {"head": replace(HEAD, sequence=3, event_id=UUID(int=7))},
            [
                "waits behind 2 deliveries of its lane; the first is sequence 3 "
                f"(event {UUID(int=7)})"
            ],
        ),
        (
            {
                "head": replace(
                    HEAD,
                    sequence=4,
                    event_id=None,
                    attempts=3,
                    next_attempt_at=NOW + timedelta(seconds=30),
                    last_response={"status": 500},
                )
            },
            [
                "waits behind 1 delivery of its lane; the first is sequence 4, which failed after "
                "3 attempts, "
                "the last: it responded with 500; the next is in 30s; to skip it: "
                "outbox dead skip 'bill ing' --lane l-1-0 --sequence 4"
            ],
        ),
        (
            {
                "head": replace(
                    HEAD, attempts=1, next_attempt_at=NOW, last_response={"failure": "connect"}
                )
            },
            ["failed after 1 attempt, the last: no connection; the next is due now"],
        ),
        (
            # The next delivery would fail as well.
            {
                "head": replace(
                    HEAD, attempts=30, next_attempt_at=NOW, last_response={"failure": "connect"}
                )
            },
            [
                "failed after 30 attempts, the last: no connection; the next is due now; to hold "
                "its deliveries until its receiver works: outbox endpoint pause 'bill ing'"
            ],
        ),
        (
            # It may be a short outage.
            {"head": replace(HEAD, attempts=2, last_response={"status": 503})},
            ["failed after 2 attempts, the last: it responded with 503"],
        ),
        (
            {
                "health": "failing",
                "probes": False,
                "head": replace(HEAD, attempts=5, last_response={"status": 500}),
            },
            [
                f"waits: its endpoint has been failing for 2d; {NO_PROBING_TEXT}",
                "failed after 5 attempts, the last: it responded with 500; to skip it: "
                "outbox dead skip 'bill ing' --lane l-1-0 --sequence 5; or, if its receiver fails "
                "at others as well, to hold them: outbox endpoint pause 'bill ing'",
            ],
        ),
        (
            {
                "health": "rejecting",
                "head": replace(HEAD, attempts=10, last_response={"status": 404}),
            },
            [
                f"waits: its endpoint has been rejecting for 2d; {PROBING_TEXT}",
                "failed after 10 attempts, the last: it responded with 404; to hold its "
                "deliveries until its receiver works: outbox endpoint pause 'bill ing'",
            ],
        ),
        (
            {
                "state": "paused",
                "health": "failing",
                "head": replace(HEAD, attempts=10, last_response={"status": 503}),
            },
            [
                "waits: its endpoint has been paused for 2d; outbox endpoint resume 'bill ing'",
                "waits: its endpoint has been failing for 2d",
                "failed after 10 attempts, the last: it responded with 503",
            ],
        ),
        (
            # The next delivery would fail as well.
            {
                "health": "failing",
                "failing_lanes": 2,
                "head": replace(HEAD, attempts=5, last_response={"status": 500}),
            },
            [
                f"waits: its endpoint has been failing for 2d; {PROBING_TEXT}",
                "failed after 5 attempts, the last: it responded with 500; to hold its "
                "deliveries until its receiver works: outbox endpoint pause 'bill ing'",
            ],
        ),
        (
            {
                "health": "failing",
                "head": replace(
                    HEAD,
                    attempts=59,
                    probes=55,
                    next_attempt_at=NOW + timedelta(hours=4),
                    last_response={"status": 503},
                ),
            },
            [
                f"waits: its endpoint has been failing for 2d; {PROBING_TEXT}",
                "failed after 4 attempts and 55 probes, which do not count, the last: it "
                "responded with 503; to hold its deliveries until its receiver works: outbox "
                "endpoint pause 'bill ing'",
            ],
        ),
        (
            {
                "state": "paused",
                "head": replace(
                    HEAD, attempts=1, next_attempt_at=NOW, last_response={"status": 500}
                ),
            },
            [
                "waits: its endpoint has been paused for 2d; outbox endpoint resume 'bill ing'",
                "failed after 1 attempt, the last: it responded with 500; to skip it: "
                "outbox dead skip 'bill ing' --lane l-1-0 --sequence 5",
            ],
        ),
    ],
)
def test_a_pending_delivery_is_explained(changes: dict[str, Any], says: list[str]) -> None:
    assert pending(**changes) == says


def test_all_causes_are_listed_the_endpoint_first() -> None:
    reported = pending(state="paused", blocked_since=NOW, head=replace(HEAD, sequence=2))
    assert [sentence.split(":")[0].split(" of ")[0] for sentence in reported] == [
        "waits",
        "waits",
        "waits behind 3 deliveries",
    ]
