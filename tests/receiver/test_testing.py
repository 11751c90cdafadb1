"""The testing kit creates what a relay would send, and its faulty network injects faults."""

from __future__ import annotations

import pytest

from outbox.errors import UsageError
from outbox.receiver import (
    AsyncReceiver,
    Gaps,
    MemoryDatabase,
    Message,
    Receiver,
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
def test_a_checkpoint_reveals_a_missing_end(gaps: Gaps, caplog: pytest.LogCaptureFixture) -> None:
    sender = FakeSender()
    receiver = Receiver(sender.secret, MemoryDatabase(), fetch=sender, gaps=gaps)
    came: list[int] = []

    @receiver.on("a.b")
    def handle(message: Message, _: object) -> None:
        came.append(message.data)

    assert receiver.handle(sender.event("a.b", 1)).status == 200
    assert receiver.handle(sender.checkpoint()).text == "no delivery is missing"
    assert receiver.totals.gaps == 0
    sender.event("a.b", 2)
    sender.dead_letter(sender.event("a.b", 3))
    response = receiver.handle(sender.checkpoint())
    assert (response.status, response.text) == (200, "deliveries are missing")
    assert receiver.totals.gaps == 1
    assert f"lane {sender.lane()}: acknowledged, not received: 2" in caplog.text
    levels = {record.levelname for record in caplog.records if "not received" in record.message}
    assert levels == ({"ERROR"} if gaps is Gaps.REPORT else {"WARNING"})
    assert came == ([1] if gaps is Gaps.REPORT else [1, 2])
    # An unreachable relay is not a reason to refuse; it is asked again later.
    sender.event("a.b", 4)
    lanes = sender._lanes
    request = sender.checkpoint()
    sender._lanes = {}
    assert receiver.handle(request).status == 200
    sender._lanes = lanes
    assert receiver.handle(request).text == "deliveries are missing"
    assert receiver.totals.gaps == 2
    if gaps is Gaps.REPORT:
        receiver.catch_up()
    assert sorted(came) == [1, 2, 4]
    assert receiver.handle(request).text == "no delivery is missing"
    assert verify(request.headers, request.body, sender.secret).checkpoint is not None


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


def test_a_checkpoint_that_cannot_be_read_is_refused() -> None:
    sender = FakeSender()
    receiver = Receiver(sender.secret, MemoryDatabase())
    body = b'{"type": "outbox.checkpoint", "lanes": [7]}'
    response = receiver.handle(Request("POST", sign(sender.secret, "msg_1", body), body))
    assert (response.status, response.text) == (
        400,
        "a lane of the checkpoint has no valid name, generation and sequences",
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
    sent = [sender.event("a.b", n) for n in range(250)]
    await receiver.handle(sent[0])
    (caught_up,) = await receiver.catch_up()
    assert caught_up.fetched == 249


async def test_a_request_is_posted_as_it_is() -> None:
    from outbox.devtools.development_receiver import DevelopmentReceiver

    sender = FakeSender()
    receiver = DevelopmentReceiver()
    async with receiver.serve() as url:
        assert await send(url, sender.event("a.b", 1)) == 200
    assert receiver.totals().accepted == 1
