"""Why an event is where it is, in words; each reason alone, and in the order that helps."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outbox.core.delivery.circuit_breaker import PROBING
from outbox.operations.event_trace import (
    Delivery,
    Event,
    Head,
    Letter,
    Missed,
    Sequenced,
    Sequencing,
    Standing,
    Story,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENT = Event(
    outbox_id=17,
    event_id=UUID(int=1),
    type="order.paid",
    tenant=None,
    key="order-17",
    published_at=NOW - timedelta(hours=3),
    expires_at=None,
    headers=None,
    payload_bytes=12,
    erased_at=None,
)
STANDING = Standing(
    state="active",
    state_at=NOW - timedelta(days=2),
    state_by=None,
    state_why=None,
    health="healthy",
    health_since=NOW - timedelta(days=2),
    held_until=None,
    relay="relay-1",
    head=Head(
        sequence=5,
        event_id=EVENT.event_id,
        attempts=0,
        probes=0,
        next_attempt_at=None,
        last_answer=None,
    ),
    blocked_since=None,
    blocked_by=None,
    older_owed=0,
)
DELIVERY = Delivery(
    endpoint="bill ing",
    endpoint_id=UUID(int=2),
    lane="l-1-0",
    sequence=5,
    delivery_id=UUID(int=3),
    numbered_at=NOW,
    replay_of=None,
    backfill=None,
    attempts=(),
    letter=None,
    standing=STANDING,
)
LETTER = Letter(id=9, reason="refused", state="dead", at=NOW, attempts=1, sequence=5, to_sequence=5)
WHERE = "bill ing: number 5 of lane l-1-0 "


def story(*deliveries: Delivery, **more: Any) -> Story:
    values: dict[str, Any] = {
        "at": NOW,
        "event": EVENT,
        "sequenced": Sequenced(3, NOW, late=False),
        "sequencing": None,
        "log_dropped": False,
        "deliveries": deliveries,
        "deliveries_total": len(deliveries),
        "missed": (),
    }
    return Story(**values | more)


def owed(**changes: Any) -> list[str]:
    """What is said of a delivery that is owed, without its place."""
    delivery = replace(DELIVERY, standing=replace(STANDING, **changes))
    told = story(delivery).diagnosis
    assert all(sentence.startswith(WHERE) for sentence in told)
    return [sentence.removeprefix(WHERE) for sentence in told]


def test_nothing_is_said_of_what_is_delivered() -> None:
    done = replace(DELIVERY, standing=None)
    assert done.fate == "delivered"
    assert story(done).diagnosis == ()


@pytest.mark.parametrize(
    ("sequencing", "says"),
    [
        (Sequencing(16, False, 0, None), "no relay is alive; start one: outbox relay"),
        (Sequencing(20, True, 1, "r"), "it was committed late"),
        (Sequencing(15, False, 1, "r"), "relay r leads, and is 2 ids behind"),
        (Sequencing(15, False, 1, None), "no relay leads"),
    ],
)
def test_why_it_is_not_sequenced(sequencing: Sequencing, says: str) -> None:
    (told,) = story(sequenced=None, sequencing=sequencing).diagnosis
    assert says in told


def test_nobody_wanted_it() -> None:
    missed = (Missed("type", 3, ("a", "b", "c")), Missed("filter", 1, ("d",)))
    (told,) = story(missed=missed).diagnosis
    assert told == (
        "no endpoint subscribed to it: 3 not for its type (a, b, c); "
        "1 with a filter that its payload does not meet (d)"
    )


def test_what_must_never_be_is_said() -> None:
    (told,) = story(replace(DELIVERY, standing=None), missed=(Missed("lost", 1, ("a",)),)).diagnosis
    assert told == "it never went to 1 that should have got it: run outbox verify (a)"


def test_a_log_that_is_gone_tells_nothing_more() -> None:
    (told,) = story(sequenced=None, log_dropped=True).diagnosis
    assert "dropped with the log of that time" in told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            "was given up because its receiver refused it; it is dead letter 9: "
            "outbox dead replay 9",
        ),
        ({"reason": "erased"}, "was given up because its event was erased; it is dead letter 9"),
        (
            {"state": "discarded"},
            "was given up because its receiver refused it, and discarded as dead letter 9",
        ),
        (
            {"state": "replaying", "reason": "exhausted"},
            "was given up because its retries ended; it is being sent again",
        ),
    ],
)
def test_why_it_was_given_up(changes: dict[str, Any], says: str) -> None:
    dead = replace(DELIVERY, standing=None, letter=replace(LETTER, **changes))
    assert story(dead).diagnosis == (WHERE + says,)


@pytest.mark.parametrize("state", ["replayed", "dead_again"])
def test_of_what_was_sent_again_the_new_delivery_speaks(state: Any) -> None:
    dead = replace(DELIVERY, standing=None, letter=replace(LETTER, state=state))
    assert dead.fate == state
    assert story(dead).diagnosis == ()


HEAD = STANDING.head


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ["is about to be sent"]),
        (
            {"state": "paused", "state_by": "ann@host", "state_why": "migration"},
            [
                "waits: its endpoint is paused since 2 d by ann@host (migration); "
                "outbox endpoint resume 'bill ing'"
            ],
        ),
        ({"state": "removing"}, ["waits: its endpoint is removing since 2 d"]),
        (
            {"relay": None},
            ["waits: no relay that is alive owns its endpoint; see outbox status"],
        ),
        (
            {"blocked_since": NOW - timedelta(minutes=5), "blocked_by": 8},
            [
                "waits: its lane is blocked since 5 m until somebody decides about a dead letter: "
                "outbox dead replay 8, outbox dead discard 8 or outbox endpoint resume 'bill ing'"
            ],
        ),
        (
            {"older_owed": 4},
            ["waits for 4 of the lanes that its endpoint had before their number was changed"],
        ),
        (
            {"held_until": NOW + timedelta(seconds=90), "health": "failing"},
            ["waits for 2 m more, as its receiver asked (Retry-After)"],
        ),
        ({"health": "refusing"}, [f"waits: its endpoint is refusing since 2 d; {PROBING}"]),
        (
            {"health": "failing", "relay": None},
            [
                "waits: no relay that is alive owns its endpoint; see outbox status",
                "waits: its endpoint is failing since 2 d",
            ],
        ),
        (
            {"head": replace(HEAD, sequence=3, event_id=UUID(int=7))},
            [f"waits behind 2 of its lane, the first is number 3 (event {UUID(int=7)})"],
        ),
        (
            {
                "head": replace(
                    HEAD,
                    sequence=4,
                    event_id=None,
                    attempts=3,
                    next_attempt_at=NOW + timedelta(seconds=30),
                    last_answer={"status": 503},
                )
            },
            [
                "waits behind 1 of its lane, the first is number 4, which failed in 3 attempts, "
                "the last: it answered 503; the next is in 30 s"
            ],
        ),
        (
            {
                "head": replace(
                    HEAD, attempts=1, next_attempt_at=NOW, last_answer={"failure": "connect"}
                )
            },
            ["failed in 1 attempt, the last: no connection; the next is due"],
        ),
        (
            {
                "health": "failing",
                "head": replace(
                    HEAD,
                    attempts=59,
                    probes=55,
                    next_attempt_at=NOW + timedelta(hours=4),
                    last_answer={"status": 503},
                ),
            },
            [
                f"waits: its endpoint is failing since 2 d; {PROBING}",
                "failed in 59 attempts (55 of them free probes), the last: it answered 503",
            ],
        ),
        (
            {
                "state": "paused",
                "head": replace(HEAD, attempts=1, next_attempt_at=NOW, last_answer={"status": 503}),
            },
            [
                "waits: its endpoint is paused since 2 d; outbox endpoint resume 'bill ing'",
                "failed in 1 attempt, the last: it answered 503",
            ],
        ),
    ],
)
def test_what_it_waits_for(changes: dict[str, Any], says: list[str]) -> None:
    assert owed(**changes) == says


def test_everything_in_the_way_is_said_the_endpoint_first() -> None:
    told = owed(state="paused", blocked_since=NOW, head=replace(HEAD, sequence=2))
    assert [sentence.split(":")[0].split(" of ")[0] for sentence in told] == [
        "waits",
        "waits",
        "waits behind 3",
    ]
