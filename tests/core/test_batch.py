"""Batches: several deliveries in one request, its bytes, its id, and the meaning of a response."""

from __future__ import annotations

from uuid import UUID

import orjson
import pytest

from outbox.core.delivery.commands import ErasedEvent, Fetch, LaneSnapshot, Progress, Send
from outbox.core.delivery.lane import Lane
from outbox.core.messages.batch import (
    BATCH_BYTES_MAX,
    BatchSize,
    accepted_through,
    classify_batch,
    element_bytes,
    prepare_batch,
)
from outbox.core.messages.envelope import envelope
from outbox.core.messages.message import prepare
from outbox.core.model.headers import EndpointHeaders, parse_lines
from outbox.core.model.message_format import BATCH_MAX
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import RETRYABLE, AttemptOutcome
from tests.core.lane_invariants import POLICY
from tests.core.lane_steps import BUSY
from tests.core.lane_tables import ENDPOINT, EPOCH_S, delivery

NOW = EPOCH_S


def test_an_events_header_with_the_prefix_of_the_endpoint_is_in_no_element() -> None:
    forged = orjson.dumps({"Acme-Sequence": "9", "Acme-Env": "a"})
    prepared = prepare_batch(
        [delivery(1)._replace(headers=forged)], 0, headers=EndpointHeaders(prefix="Acme-")
    )
    assert orjson.loads(prepared.body)[0]["headers"] == {"Acme-Env": "a"}
    assert "Acme-Last-Sequence: 1\r\n" in prepared.lines


def test_the_body_is_an_array_of_the_bodies_and_each_has_its_x_delivery() -> None:
    batch = [delivery(n) for n in (5, 6, 7)]
    prepared = prepare_batch(batch, 3)
    elements = orjson.loads(prepared.body)
    for each, previous, element in zip(batch, (3, 5, 6), elements, strict=True):
        assert element.pop("delivery") == each.message_id
        assert element == orjson.loads(envelope(each, previous))
    headers = dict(parse_lines(prepared.attempt(2, 1, [b"k"])))
    assert headers["X-Lane"] == "lane"
    assert [headers[f"X-{name}"] for name in ("Sequence", "Last-Sequence")] == ["5", "7"]
    assert [headers["X-Previous-Sequence"], headers["X-Attempt"]] == ["3", "2"]
    assert headers["X-Delivery"] == headers["webhook-id"] == prepared.message_id
    assert not {"X-Event", "X-Event-Id"} & headers.keys()


def test_the_last_delivery_of_a_batch_marks_the_lane_end() -> None:
    elements = orjson.loads(prepare_batch([delivery(1), delivery(2)], 0, lane_ends=True).body)
    assert [each.get("lane_ends") for each in elements] == [None, True]


def test_a_batch_of_one_is_an_array_with_the_id_of_its_delivery() -> None:
    prepared = prepare_batch([delivery(1)], 0)
    (element,) = orjson.loads(prepared.body)
    assert prepared.message_id == element["delivery"] == prepare(delivery(1), 0).message_id


def test_event_headers_are_in_their_array_element_unless_the_endpoint_sets_them() -> None:
    own = orjson.dumps({"traceparent": "00-1", "x-key": "theirs", "Host": "evil"})
    batch = [delivery(1)._replace(headers=own), delivery(2)]
    prepared = prepare_batch(batch, 0, headers=EndpointHeaders((("X-Key", "ours"),)))
    first, second = orjson.loads(prepared.body)
    assert first["headers"] == {"traceparent": "00-1"}
    assert "headers" not in second
    assert dict(parse_lines(prepared.lines))["X-Key"] == "ours"
    assert "traceparent" not in prepared.lines


def test_a_batch_id_is_unique_to_its_deliveries() -> None:
    """A receiver that deduplicates by batch id must not drop a delivery it has not received."""
    four = [delivery(n) for n in (1, 2, 3, 4)]
    cuts = [(i, j) for i in range(4) for j in range(i + 1, 5)]
    ids = [prepare_batch(four[i:j], 0).message_id for i, j in cuts]
    assert len(set(ids)) == len(cuts)
    assert ids == [prepare_batch(four[i:j], 0).message_id for i, j in cuts]
    for text in ids:
        assert (UUID(text).version, UUID(text).variant) == (8, "specified in RFC 4122")
    # A dead-lettered delivery returns in a replay, in another batch.
    again = [each._replace(seq=each.seq + 10) for each in (four[0], four[2], four[3])]
    assert prepare_batch(again, 0).message_id not in ids
    elsewhere = [each._replace(endpoint_id=UUID(int=2)) for each in four]
    assert prepare_batch(elsewhere, 0).message_id not in ids


@pytest.mark.parametrize(
    ("header", "through"),
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
        # An invalid header accepts nothing.
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
def test_the_accepted_sequence_is_read_from_the_header(
    header: list[str], through: int | None
) -> None:
    headers = [("X-ACCEPTED-through", value) for value in header]
    assert accepted_through([("Date", "7"), *headers], 5, 9) == through


@pytest.mark.parametrize(
    ("status", "header", "outcome", "through"),
    [
        (200, None, AttemptOutcome.DELIVERED, 9),
        (204, "9", AttemptOutcome.DELIVERED, 9),
        (200, "6", AttemptOutcome.DELIVERED, 6),
        # A 2xx that accepts nothing is not a success, or it would be retried for ever.
        (200, "4", AttemptOutcome.RETRY, 4),
        (200, "nonsense", AttemptOutcome.RETRY, 4),
        (503, None, AttemptOutcome.RETRY, 4),
        (503, "6", AttemptOutcome.RETRY, 6),
        (400, "6", AttemptOutcome.REFUSED, 6),
        # A failure is attributed to a delivery.
        (500, "9", AttemptOutcome.RETRY, 8),
        # One of the deliveries was sent before, and it is unknown which.
        (409, None, AttemptOutcome.REFUSED, 4),
        (302, None, AttemptOutcome.REFUSED, 4),
    ],
)
def test_outcome_and_accepted_sequence_of_a_batch_response(
    status: int, header: str | None, outcome: AttemptOutcome, through: int
) -> None:
    headers = () if header is None else (("X-Accepted-Through", header),)
    response = AttemptResult.completed(status, 0.1, headers=headers)
    batch = [delivery(n) for n in range(5, 10)]
    meant = classify_batch(batch, response, maybe_sent_before=True, retryable=RETRYABLE)
    assert meant == (outcome, through)


def test_a_batch_of_one_is_classified_like_a_delivery() -> None:
    one, options = [delivery(5)], {"maybe_sent_before": True, "retryable": RETRYABLE}
    conflict, timeout = (
        AttemptResult.completed(409, 0.1),
        AttemptResult.failed(Failure.TIMEOUT, "", 1.0),
    )
    assert classify_batch(one, conflict, **options) == (AttemptOutcome.DELIVERED, 5)
    assert classify_batch(one, timeout, **options) == (AttemptOutcome.RETRY, 4)


# ---------------------------------------------------------- batches of a lane


def lane_of(*deliveries: object, batch_max: int | None = 3) -> Lane:
    lane = Lane(LaneSnapshot(7, len(deliveries), Progress()), 0, batch_max=batch_max)
    assert isinstance(lane.next(NOW), Fetch)
    lane.append_fetched(deliveries)  # type: ignore[arg-type]
    return lane


def sent(lane: Lane) -> list[int]:
    command = lane.next(NOW)
    assert isinstance(command, Send)
    return [each.seq for each in command.batch]


def test_a_batch_is_limited_by_count_and_bytes() -> None:
    big = delivery(2)._replace(payload=b'"%b"' % (b"x" * (BATCH_BYTES_MAX // 2)))
    assert sent(lane_of(*map(delivery, range(1, 6)))) == [1, 2, 3]
    assert sent(lane_of(delivery(1), big, big._replace(seq=3))) == [1, 2]
    alone = delivery(1)._replace(payload=b'"%b"' % (b"x" * BATCH_BYTES_MAX))
    assert sent(lane_of(alone, delivery(2))) == [1]


def test_a_body_never_exceeds_its_limit() -> None:
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


def test_a_batch_never_spans_an_erased_event() -> None:
    assert sent(lane_of(delivery(1), ErasedEvent(ENDPOINT, 2, 1, 102), delivery(3))) == [1]


def test_a_lane_with_large_batches_prefetches_within_its_byte_limit() -> None:
    few = lane_of(*map(delivery, range(1, 21)), batch_max=20)
    few.extend_to(100, NOW)
    assert few.fetch() is not None
    large = [delivery(n)._replace(payload=b'"%b"' % (b"x" * 100_000)) for n in range(1, 21)]
    many = lane_of(*large, batch_max=20)
    many.extend_to(100, NOW)
    assert many.fetch() is None


def test_batches_grow_after_a_failure_and_shrink_to_the_accepted_size() -> None:
    size = BatchSize()
    assert size.current == BATCH_MAX
    size.record_failed(50)
    grown = []
    for _ in range(4):
        grown.append(size.current)
        size.record_accepted(60, size.current, of=size.current)
    assert grown == [1, 2, 4, 8]
    size.record_accepted(70, 5, of=16)
    assert (size.current, size.sent_through_seq) == (5, 70)


def test_a_retry_budget_begins_when_the_delivery_fails_alone() -> None:
    """The retry budget does not begin with a failure that another delivery may have caused."""
    lane = lane_of(delivery(1), delivery(2))
    assert sent(lane) == [1, 2]
    failed = AttemptResult.failed(Failure.TIMEOUT, "", 1.0)
    batch = (delivery(1), delivery(2))
    _, record = lane.record_batch_result(
        batch, 0, AttemptOutcome.RETRY, failed, POLICY, started_at=NOW, now=NOW, u=0.5
    )
    assert record is not None
    assert record.progress is not None
    assert (record.progress.spent, record.progress.first_attempt_at) == (0, None)
    lane.confirm_recorded(record)
    later = NOW + POLICY.age_max_s
    assert isinstance(lane.next(later), Send)
    record = lane.record_result(
        AttemptOutcome.RETRY, failed, POLICY, started_at=later, now=later, u=0.5
    )
    assert record.dead is None
    assert record.progress is not None
    assert (record.progress.spent, record.progress.first_attempt_at) == (1, later)


def test_a_batch_keeps_its_slot_when_a_delivery_expires_while_it_waits() -> None:
    soon = NOW + 5
    lane = lane_of(delivery(1), delivery(2, expires_at=soon), delivery(3))
    lane.mark_ended()
    send = lane.next(NOW)
    assert isinstance(send, Send)
    assert (len(send.batch), send.lane_ends) == (3, True)
    assert lane.revalidate(send, NOW + 1) == send
    left = lane.revalidate(send, NOW + 5)
    assert left == send._replace(batch=send.batch[:1], lane_ends=False)
    assert (
        lane.revalidate(send._replace(delivery=send.batch[1], batch=send.batch[1:]), NOW + 5)
        is None
    )
    lane.dead_letter_through(1, "backlog")
    assert lane.revalidate(send, NOW + 1) is None


def test_the_refill_check_does_not_scan_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check runs for each lane whenever an event is sequenced."""
    large = [delivery(n)._replace(payload=b'"%b"' % (b"x" * 100_000)) for n in range(1, 21)]
    lane = lane_of(*large, batch_max=20)
    with monkeypatch.context() as patch:
        patch.setattr("outbox.core.delivery.delivery_buffer.element_bytes", None)
        assert not lane._buffer.is_low
    lane.set_batch_max(None)
    assert not lane._buffer.is_low
    lane.set_batch_max(30)
    assert not lane._buffer.is_low
    send = lane.next(NOW)
    assert isinstance(send, Send)
    (*_, last) = send.batch
    response = AttemptResult.completed(200, 0.1)
    lane.record_batch_result(
        send.batch,
        last.seq,
        AttemptOutcome.DELIVERED,
        response,
        POLICY,
        started_at=NOW,
        now=NOW,
        u=0.5,
    )
    # More remains than fits in one request, until two deliveries are gone.
    assert (20 - last.seq, lane._buffer.is_low) == (11, False)
    lane.next(NOW)
    lane.record_result(AttemptOutcome.DELIVERED, response, POLICY, started_at=NOW, now=NOW, u=0.5)
    lane.next(NOW)
    lane.record_result(AttemptOutcome.DELIVERED, response, POLICY, started_at=NOW, now=NOW, u=0.5)
    assert lane._buffer.is_low


def rounds(size: BatchSize, takes: int, count: int) -> list[int]:
    """Return the batch sizes sent to a receiver that accepts at most this many deliveries."""
    sizes = []
    for _ in range(count):
        sizes.append(size.current)
        if size.current > takes:
            size.record_failed(1, size.current)
        else:
            size.record_accepted(1, size.current, of=size.current)
    return sizes


@pytest.mark.parametrize("takes", [1, 3, 10, 100])
def test_a_receiver_that_accepts_few_deliveries_seldom_gets_larger_batches(takes: int) -> None:
    size = BatchSize()
    rounds(size, takes, 100)
    sizes = rounds(size, takes, 1000)
    assert sum(each > takes for each in sizes) < 10
    assert sum(sizes) > 1000 * takes / 4
    # When the receiver accepts more, batches grow.
    assert BATCH_MAX in rounds(size, BATCH_MAX, 10_000)


def test_occasional_failures_do_not_keep_batches_small() -> None:
    size = BatchSize()
    for _ in range(50):
        size.record_failed(1, size.current)
        sizes = rounds(size, BATCH_MAX, 14)
    assert sizes[-1] == BATCH_MAX


@pytest.mark.parametrize("is_known", [False, True])
def test_a_conflict_refuses_a_delivery_that_was_not_sent_before(is_known: bool) -> None:
    """A delivery that was in a failed batch is refused with 409.

    As a success, the refused delivery would be lost.
    """
    lane = Lane(LaneSnapshot(7, 2, Progress()), int(is_known), batch_max=3)
    lane.next(NOW)
    lane.append_fetched([delivery(1), delivery(2)])
    send = lane.next(NOW)
    assert isinstance(send, Send)
    conflict, policy = AttemptResult.completed(409, 0.1), POLICY
    _, record = lane.record_batch_result(
        send.batch, 0, AttemptOutcome.REFUSED, conflict, policy, started_at=NOW, now=NOW, u=0.5
    )
    assert record is not None
    lane.confirm_recorded(record)
    alone = lane.next(NOW)
    assert isinstance(alone, Send)
    assert (alone.attempt, alone.maybe_sent_before) == (2, is_known)
    lane.confirm_recorded(
        lane.record_result(AttemptOutcome.RETRY, BUSY, policy, started_at=NOW, now=NOW, u=0.5)
    )
    # The delivery was sent alone, and may have been received.
    later = lane.next(NOW + 1e4)
    assert isinstance(later, Send)
    assert later.maybe_sent_before


def test_a_batch_is_delivered_if_all_of_it_was_stored_before_the_connection_ended() -> None:
    lane = lane_of(delivery(1), delivery(2))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    failed = AttemptResult.failed(Failure.UNKNOWN, "the connection ended", 0.1)
    accepted, record = lane.record_batch_result(
        send.batch, 2, AttemptOutcome.RETRY, failed, POLICY, started_at=NOW, now=NOW, u=0.5
    )
    assert ([row.seq for row in accepted.rows], record) == ([1, 2], None)
    assert (lane.acked_seq, lane.in_flight, lane.failing) == (2, False, False)
