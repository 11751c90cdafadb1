"""Several deliveries in one request: its bytes, its id, and what an answer to it means."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import orjson
import pytest

from outbox.core.delivery.batch import (
    BATCH_BYTES_MAX,
    BatchSize,
    accepted_through,
    classify_batch,
    element_bytes,
    prepare_batch,
)
from outbox.core.delivery.commands import Fetch, Gone, Progress, Send
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.message import body_of, prepare
from outbox.core.model.endpoint import BATCH_MAX
from outbox.core.model.headers import pairs
from outbox.core.model.response import RETRYABLE, Answer, Failure, Verdict
from tests.core.lane_invariants import POLICY
from tests.core.lane_steps import BUSY
from tests.core.lane_tables import ENDPOINT, EPOCH_S, delivery

NOW = EPOCH_S


def test_the_body_is_an_array_of_the_bodies_and_each_has_its_x_delivery() -> None:
    batch = [delivery(n) for n in (5, 6, 7)]
    prepared = prepare_batch(batch, 3)
    elements = orjson.loads(prepared.body)
    for each, previous, element in zip(batch, (3, 5, 6), elements, strict=True):
        assert element.pop("delivery") == each.message_id
        assert element == orjson.loads(body_of(each, previous))
    headers = dict(pairs(prepared.attempt(2, 1, [b"k"])))
    assert headers["X-Lane"] == "lane"
    assert [headers[f"X-{name}"] for name in ("Sequence", "Last-Sequence")] == ["5", "7"]
    assert [headers["X-Previous-Sequence"], headers["X-Attempt"]] == ["3", "2"]
    assert headers["X-Delivery"] == headers["webhook-id"] == prepared.message_id
    assert "X-Event" not in headers


def test_the_end_of_a_lane_is_told_by_the_last_one() -> None:
    elements = orjson.loads(prepare_batch([delivery(1), delivery(2)], 0, lane_ends=True).body)
    assert [each.get("lane_ends") for each in elements] == [None, True]


def test_one_delivery_is_an_array_too_and_the_id_is_its_own() -> None:
    prepared = prepare_batch([delivery(1)], 0)
    (element,) = orjson.loads(prepared.body)
    assert prepared.message_id == element["delivery"] == prepare(delivery(1), 0).message_id


def test_an_events_headers_stand_in_its_element_but_for_those_that_the_endpoint_sets() -> None:
    own = orjson.dumps({"traceparent": "00-1", "x-key": "theirs", "Host": "evil"})
    batch = [delivery(1)._replace(headers=own), delivery(2)]
    prepared = prepare_batch(batch, 0, endpoint_headers=(("X-Key", "ours"),))
    first, second = orjson.loads(prepared.body)
    assert first["headers"] == {"traceparent": "00-1"}
    assert "headers" not in second
    assert dict(pairs(prepared.lines))["X-Key"] == "ours"
    assert "traceparent" not in prepared.lines


def test_a_batch_has_the_same_id_only_with_the_same_deliveries() -> None:
    """Or whoever drops a batch by its id drops what it has not had."""
    four = [delivery(n) for n in (1, 2, 3, 4)]
    cuts = [(i, j) for i in range(4) for j in range(i + 1, 5)]
    ids = [prepare_batch(four[i:j], 0).message_id for i, j in cuts]
    assert len(set(ids)) == len(cuts)
    assert ids == [prepare_batch(four[i:j], 0).message_id for i, j in cuts]
    for text in ids:
        assert (UUID(text).version, UUID(text).variant) == (8, "specified in RFC 4122")
    # What was given up comes again, with other company between.
    again = [each._replace(seq=each.seq + 10) for each in (four[0], four[2], four[3])]
    assert prepare_batch(again, 0).message_id not in ids
    elsewhere = [each._replace(endpoint_id=UUID(int=2)) for each in four]
    assert prepare_batch(elsewhere, 0).message_id not in ids


@pytest.mark.parametrize(
    ("said", "through"),
    [
        ([], None),
        (["7"], 7),
        ([" 7 "], 7),
        (["4"], 4),
        (["3"], 4),
        (["0"], 4),
        (["9"], 9),
        (["10"], 9),
        (["7", "7"], 7),
        # What makes no sense accepts nothing.
        (["7", "8"], 4),
        (["7, 7"], 4),
        ([""], 4),
        (["-1"], 4),
        (["seven"], 4),
        (["\u0667"], 4),
        (["7.0"], 4),
        (["9" * 5000], 4),
    ],
)
def test_what_is_accepted_is_what_the_header_says(said: list[str], through: int | None) -> None:
    headers = [("X-ACCEPTED-through", value) for value in said]
    assert accepted_through([("Date", "7"), *headers], 5, 9) == through


@pytest.mark.parametrize(
    ("status", "said", "verdict", "through"),
    [
        (200, None, Verdict.DELIVERED, 9),
        (204, "9", Verdict.DELIVERED, 9),
        (200, "6", Verdict.DELIVERED, 6),
        # It said yes, and took none of it: not a success, or it would be asked for ever.
        (200, "4", Verdict.RETRY, 4),
        (200, "nonsense", Verdict.RETRY, 4),
        (503, None, Verdict.RETRY, 4),
        (503, "6", Verdict.RETRY, 6),
        (400, "6", Verdict.REFUSED, 6),
        # A failure is somebody's.
        (500, "9", Verdict.RETRY, 8),
        # One of them was sent before, and nobody knows which.
        (409, None, Verdict.REFUSED, 4),
        (302, None, Verdict.REFUSED, 4),
    ],
)
def test_what_an_answer_to_a_batch_means(
    status: int, said: str | None, verdict: Verdict, through: int
) -> None:
    headers = () if said is None else (("X-Accepted-Through", said),)
    answer = Answer.of(status, 0.1, headers=headers)
    batch = [delivery(n) for n in range(5, 10)]
    meant = classify_batch(batch, answer, maybe_sent_before=True, retryable=RETRYABLE)
    assert meant == (verdict, through)


def test_a_batch_of_one_is_judged_like_a_delivery() -> None:
    one, ways = [delivery(5)], {"maybe_sent_before": True, "retryable": RETRYABLE}
    conflict, timeout = Answer.of(409, 0.1), Answer.failed(Failure.TIMEOUT, "", 1.0)
    assert classify_batch(one, conflict, **ways) == (Verdict.DELIVERED, 5)
    assert classify_batch(one, timeout, **ways) == (Verdict.RETRY, 4)


# ------------------------------------------------------------------ of a lane


def lane_of(*deliveries: object, batch_max: int | None = 3) -> Lane:
    lane = Lane(7, Progress(), (), len(deliveries), 0, batch_max=batch_max)
    assert isinstance(lane.next(NOW), Fetch)
    lane.fetched(deliveries)  # type: ignore[arg-type]
    return lane


def sent(lane: Lane) -> list[int]:
    command = lane.next(NOW)
    assert isinstance(command, Send)
    return [each.seq for each in command.batch]


def test_what_follows_goes_along_up_to_the_number_and_the_bytes() -> None:
    big = delivery(2)._replace(payload=b'"%b"' % (b"x" * (BATCH_BYTES_MAX // 2)))
    assert sent(lane_of(*map(delivery, range(1, 6)))) == [1, 2, 3]
    assert sent(lane_of(delivery(1), big, big._replace(seq=3))) == [1, 2]
    alone = delivery(1)._replace(payload=b'"%b"' % (b"x" * BATCH_BYTES_MAX))
    assert sent(lane_of(alone, delivery(2))) == [1]


def test_a_body_is_never_larger_than_its_bound() -> None:
    text = "\x01" * 500
    strange = delivery(1)._replace(
        type="a" * 255,
        tenant=text,
        key=text,
        headers=orjson.dumps({f"x-{n}": "v" * 400 for n in range(20)}),
        payload=b'{"a":1}',
    )
    body = prepare_batch([strange._replace(seq=2**62)], 2**62 - 1, lane_ends=True).body
    assert len(body) <= element_bytes(strange)


def test_a_hole_of_an_erased_event_is_never_in_the_middle() -> None:
    assert sent(lane_of(delivery(1), Gone(ENDPOINT, 2, 1, 102), delivery(3))) == [1]


def test_a_lane_with_large_batches_asks_for_more_in_time_and_within_bytes() -> None:
    few = lane_of(*map(delivery, range(1, 21)), batch_max=20)
    few.offered(100, NOW)
    assert few.fetch() is not None
    large = [delivery(n)._replace(payload=b'"%b"' % (b"x" * 100_000)) for n in range(1, 21)]
    many = lane_of(*large, batch_max=20)
    many.offered(100, NOW)
    assert many.fetch() is None


def test_batches_grow_again_after_a_failure_and_shrink_to_what_is_accepted() -> None:
    size = BatchSize()
    assert size.now == BATCH_MAX
    size.failed(50)
    grown = []
    for _ in range(4):
        grown.append(size.now)
        size.accepted(60, size.now, of=size.now)
    assert grown == [1, 2, 4, 8]
    size.accepted(70, 5, of=16)
    assert (size.now, size.sent_through_seq) == (5, 70)


def test_the_time_of_a_delivery_begins_when_it_fails_alone() -> None:
    """Not with a failure that may have been another's."""
    lane = lane_of(delivery(1), delivery(2))
    assert sent(lane) == [1, 2]
    failed = Answer.failed(Failure.TIMEOUT, "", 1.0)
    batch = (delivery(1), delivery(2))
    (record,) = lane.batch_answered(
        batch, 0, Verdict.RETRY, failed, POLICY, started_at=NOW, now=NOW, u=0.5
    )
    assert record.progress is not None
    assert (record.progress.spent, record.progress.first_attempt_at) == (0, None)
    lane.recorded(record)
    later = NOW + POLICY.age_max_s
    assert isinstance(lane.next(later), Send)
    record = lane.answered(Verdict.RETRY, failed, POLICY, started_at=later, now=later, u=0.5)
    assert record.dead is None
    assert record.progress is not None
    assert (record.progress.spent, record.progress.first_attempt_at) == (1, later)


def test_what_expires_while_a_batch_waits_for_its_turn_does_not_cost_it_the_turn() -> None:
    soon = datetime.fromtimestamp(NOW + 5, UTC)
    lane = lane_of(delivery(1), delivery(2, expires_at=soon), delivery(3))
    lane.end()
    send = lane.next(NOW)
    assert isinstance(send, Send)
    assert (len(send.batch), send.lane_ends) == (3, True)
    assert lane.still(send, NOW + 1) == send
    left = lane.still(send, NOW + 5)
    assert left == send._replace(batch=send.batch[:1], lane_ends=False)
    assert lane.still(send._replace(delivery=send.batch[1], batch=send.batch[1:]), NOW + 5) is None
    lane.cut(1, "backlog")
    assert lane.still(send, NOW + 1) is None


def test_whether_to_read_more_is_known_without_a_look_at_all_that_is_in_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked whenever something is sequenced, of each lane."""
    large = [delivery(n)._replace(payload=b'"%b"' % (b"x" * 100_000)) for n in range(1, 21)]
    lane = lane_of(*large, batch_max=20)
    with monkeypatch.context() as patch:
        patch.setattr("outbox.core.delivery.delivery_buffer.element_bytes", None)
        assert not lane.runs_dry
    lane.batch_up_to(None)
    assert not lane.runs_dry
    lane.batch_up_to(30)
    assert not lane.runs_dry
    send = lane.next(NOW)
    assert isinstance(send, Send)
    (*_, last) = send.batch
    answer = Answer.of(200, 0.1)
    lane.batch_answered(
        send.batch, last.seq, Verdict.DELIVERED, answer, POLICY, started_at=NOW, now=NOW, u=0.5
    )
    # More is left than goes in one request, until two of them are gone.
    assert (20 - last.seq, lane.runs_dry) == (11, False)
    lane.next(NOW)
    lane.answered(Verdict.DELIVERED, answer, POLICY, started_at=NOW, now=NOW, u=0.5)
    lane.next(NOW)
    lane.answered(Verdict.DELIVERED, answer, POLICY, started_at=NOW, now=NOW, u=0.5)
    assert lane.runs_dry


def rounds(size: BatchSize, takes: int, count: int) -> list[int]:
    """The lengths of batches to a receiver that takes no more than so many at once."""
    sizes = []
    for _ in range(count):
        sizes.append(size.now)
        if size.now > takes:
            size.failed(1, size.now)
        else:
            size.accepted(1, size.now, of=size.now)
    return sizes


@pytest.mark.parametrize("takes", [1, 3, 10, 100])
def test_who_takes_no_more_than_some_at_once_is_seldom_asked_for_more(takes: int) -> None:
    size = BatchSize()
    rounds(size, takes, 100)
    sizes = rounds(size, takes, 1000)
    assert sum(each > takes for each in sizes) < 10
    assert sum(sizes) > 1000 * takes / 4
    # And when it takes more, it gets more.
    assert BATCH_MAX in rounds(size, BATCH_MAX, 10_000)


def test_a_failure_now_and_then_does_not_keep_batches_small() -> None:
    size = BatchSize()
    for _ in range(50):
        size.failed(1, size.now)
        sizes = rounds(size, BATCH_MAX, 14)
    assert sizes[-1] == BATCH_MAX


@pytest.mark.parametrize("is_known", [False, True])
def test_a_conflict_is_a_refusal_of_what_nobody_was_sent_before(is_known: bool) -> None:
    """Though it went in company first: or what is refused with 409 is lost as delivered."""
    lane = Lane(7, Progress(), (), 2, int(is_known), batch_max=3)
    lane.next(NOW)
    lane.fetched([delivery(1), delivery(2)])
    send = lane.next(NOW)
    assert isinstance(send, Send)
    conflict, policy = Answer.of(409, 0.1), POLICY
    (record,) = lane.batch_answered(
        send.batch, 0, Verdict.REFUSED, conflict, policy, started_at=NOW, now=NOW, u=0.5
    )
    lane.recorded(record)
    alone = lane.next(NOW)
    assert isinstance(alone, Send)
    assert (alone.attempt, alone.maybe_sent_before) == (2, is_known)
    lane.recorded(lane.answered(Verdict.RETRY, BUSY, policy, started_at=NOW, now=NOW, u=0.5))
    # Now it was sent alone, and may be there.
    later = lane.next(NOW + 1e4)
    assert isinstance(later, Send)
    assert later.maybe_sent_before
