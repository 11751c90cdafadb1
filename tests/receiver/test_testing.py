"""The testing kit creates what a relay would send, and its faulty network injects faults."""

from __future__ import annotations

import pytest

from outbox.errors import UsageError
from outbox.receiver import (
    AsyncReceiver,
    Gaps,
    Inbox,
    MemoryDatabase,
    Message,
    Receiver,
    Refuse,
    Request,
    verify,
)
from outbox.receiver.fetch import CannotFetch
from outbox.testing import FakeSender, FaultyNetwork, send, sign

pytest_plugins = ["outbox.testing.fixtures"]


def test_a_signed_delivery_verifies() -> None:
    body = b'{"type":"x"}'
    secret = FakeSender().secret
    assert verify(sign(secret, "msg_1", body), body, secret).message_id == "msg_1"
    private = "whsk_" + "A" * 43 + "="
    public = "whpk_O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik="
    assert verify(sign(private, "msg_1", body), body, public).message_id == "msg_1"
    with pytest.raises(UsageError):
        sign("x", "msg_1", body)


def test_the_fake_sender_numbers_a_lane_like_a_relay(
    outbox_sender: FakeSender, outbox_secret: str
) -> None:
    sender = outbox_sender
    one = sender.event("a.b", {"n": 1}, key="k", tenant="acme")
    two = sender.event("a.b", {"n": 2})
    sender.dead_letter(two)
    three = sender.event("a.b", {"n": 3})
    again = sender.replay(two)
    once_more = sender.backfill(one)
    last = sender.event("a.b", None, lane=sender.lane(1), lane_ends=True)
    read = [
        verify(each.headers, each.body, outbox_secret).messages[0]
        for each in (one, two, three, again, once_more, last, sender.resend(one))
    ]
    assert None not in read
    messages = [each for each in read if each is not None]
    assert [m.sequence for m in messages] == [1, 2, 3, 4, 5, 1, 1]
    assert [m.previous_sequence for m in messages] == [0, 1, 1, 3, 4, 0, 0]
    assert (messages[0].key, messages[0].tenant, messages[0].data) == ("k", "acme", {"n": 1})
    assert messages[3].replay_of == (sender.lane(), 2)
    assert messages[3].delivery_id == messages[1].delivery_id
    assert messages[4].backfill == 1
    assert messages[4].delivery_id != messages[0].delivery_id
    assert messages[5].lane_ends
    assert [m.attempt for m in messages[-2:]] == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_event_is_processed_once_over_a_faulty_network(seed: int) -> None:
    sender = FakeSender()
    receiver = Receiver(sender.secret, MemoryDatabase(), fetch=sender)
    came: list[int] = []

    @receiver.on("a.b")
    def handle(message: Message, _: object) -> None:
        came.append(message.data)

    sent = [sender.event("a.b", n, lane=sender.lane(n % 3)) for n in range(60)]
    arrived = FaultyNetwork(seed, drop_rate=0.2, duplicate_rate=0.3, reorder_distance=4).deliver(
        sent
    )
    assert arrived != sent
    for request in arrived:
        assert receiver.handle(request).status == 200
    receiver.catch_up()
    unknown = 60 - len(came)
    # A receiver cannot know what was lost before the first arrival of a lane.
    assert unknown <= 6
    assert len(set(came)) == len(came)


@pytest.mark.parametrize("gaps", [Gaps.REPORT, Gaps.CATCH_UP])
def test_a_catch_up_finds_a_loss_at_the_end_of_a_lane(
    gaps: Gaps, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outbox.receiver")
    sender = FakeSender()
    receiver = Receiver(sender.secret, MemoryDatabase(), fetch=sender, gaps=gaps)
    came: list[int] = []

    @receiver.on("a.b")
    def handle(message: Message, _: object) -> None:
        if message.data == 5:
            raise Refuse("never")
        came.append(message.data)

    assert receiver.handle(sender.event("a.b", 1)).status == 200
    assert receiver.catch_up() == []
    # Acknowledged elsewhere: no later delivery shows the gap.
    sender.event("a.b", 2)
    for n in (3, 4):
        sender.dead_letter(sender.event("a.b", n))
    sender.event("a.b", 5)
    (result,) = receiver.catch_up()
    assert (result.fetched, result.dead_lettered, result.unavailable) == (1, 2, ((5, 5),))
    assert came == [1, 2]
    assert receiver.totals.fetched == 1
    assert (
        f"lane {sender.lane()}: caught up with 1 deliveries; dead-lettered: 2; "
        "refused or no longer retained: 5"
    ) in caplog.text
    # It is recorded: another one has nothing to do, and the next delivery shows no gap.
    assert receiver.catch_up() == []
    assert receiver.handle(sender.event("a.b", 6)).status == 200
    assert (came, receiver.totals.gaps) == ([1, 2, 6], 0)


def test_a_lane_that_was_lost_as_a_whole_is_fetched_if_the_inbox_is_older() -> None:
    for from_start in (False, True):
        sender = FakeSender()
        inbox = Inbox(from_start=from_start)
        receiver = Receiver(sender.secret, MemoryDatabase(), inbox=inbox, fetch=sender)
        receiver.on("a.b")(lambda *_: None)
        sender.event("a.b", 1)
        assert [each.fetched for each in receiver.catch_up()] == [1] * from_start


def test_a_replay_of_a_processed_delivery_is_not_processed_again() -> None:
    """Its response was lost, so the sender dead-lettered it, and an operator replayed it."""
    sender = FakeSender()
    database = MemoryDatabase()
    receiver = Receiver(sender.secret, database)
    came: list[int] = []

    @receiver.on("a.b")
    def handle(message: Message, _: object) -> None:
        came.append(message.data)

    one = sender.event("a.b", 1)
    assert receiver.handle(one).status == 200
    sender.dead_letter(one)
    assert receiver.handle(sender.replay(one)).status == 200
    assert came == [1]
    # The reverse: the replay is processed, and then the original arrives.
    two = sender.event("a.b", 2)
    sender.dead_letter(two)
    for request in (sender.replay(two), two):
        assert receiver.handle(request).status == 200
    assert came == [1, 2]


def test_a_signed_request_that_is_no_delivery_is_refused() -> None:
    sender = FakeSender()
    receiver = Receiver(sender.secret, MemoryDatabase())
    # Of a relay before 0.1.0.
    body = b'{"type": "outbox.checkpoint", "lanes": []}'
    response = receiver.handle(Request("POST", sign(sender.secret, "msg_1", body), body))
    assert (response.status, response.text) == (
        400,
        "the headers X-Lane and X-Sequence are missing",
    )


def test_a_seed_reproduces_the_network_faults() -> None:
    sender = FakeSender()
    sent = [sender.event("a.b", n) for n in range(50)]
    days = [
        FaultyNetwork(7, drop_rate=0.3, duplicate_rate=0.3, reorder_distance=3).deliver(sent)
        for _ in range(2)
    ]
    assert days[0] == days[1]
    assert FaultyNetwork().deliver(sent) == sent
    for options in ({"drop_rate": 2.0}, {"duplicate_rate": -1.0}, {"reorder_distance": -1}):
        with pytest.raises(UsageError):
            FaultyNetwork(**options)  # type: ignore[arg-type]
    with pytest.raises(CannotFetch):
        sender.page("x", 0)


async def test_an_async_receiver_fetches_from_the_fake_sender() -> None:
    sender = FakeSender()
    receiver = AsyncReceiver(sender.secret, MemoryDatabase(), fetch=sender)
    receiver.on("**")(lambda *_: None)
    sent = [sender.event("a.b", n) for n in range(250)]
    await receiver.handle(sent[0])
    (caught_up,) = await receiver.catch_up()
    assert caught_up.fetched == 249


@pytest.mark.system
async def test_a_request_is_posted_as_it_is() -> None:
    from outbox_devtools.development_receiver import DevelopmentReceiver

    sender = FakeSender()
    receiver = DevelopmentReceiver()
    async with receiver.serve() as url:
        assert await send(url, sender.event("a.b", 1)) == 200
    assert receiver.totals().accepted == 1
