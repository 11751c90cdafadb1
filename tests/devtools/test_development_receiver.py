from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.headers import lines_of
from outbox.core.model.response import Answer, Failure
from outbox.destinations.http.egress import EgressPolicy
from outbox.destinations.http.router import Outbound
from outbox.destinations.interface import Request
from outbox.devtools.development_receiver import DevelopmentReceiver, Fault, Handled, Outcome
from outbox.errors import CannotRun, UsageError
from outbox.receiver.lane_order import Kind
from tests.receiver.deliveries import OTHER, SECRET, delivery, request
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ALWAYS = 1.0


@pytest.fixture
async def transport() -> AsyncIterator[Outbound]:
    transport = Outbound(EgressPolicy(["127.0.0.0/8"]))
    yield transport
    await transport.aclose()


class Coin(random.Random):
    """Fails always; `late` says whether after the effect."""

    def __init__(self, *, late: bool) -> None:
        super().__init__(0)
        self._late = late

    def random(self) -> float:
        return 0.0 if self._late else 0.75


# ----------------------------------------------------------------- good weather


async def test_deliveries_are_verified_counted_and_shown(transport: Outbound) -> None:
    seen: list[Handled] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        for n in (1, 2, 3):
            answer = await transport.send(request(url, delivery(n)))
            assert (answer.status, answer.body) == (200, b"ok\n")
    totals = receiver.totals()
    assert (totals.requests, totals.accepted) == (3, 3)
    assert totals.good
    assert [handled.outcome for handled in seen] == [Outcome.ACCEPTED] * 3
    assert [handled.message.data for handled in seen if handled.message] == [
        {"n": 1},
        {"n": 2},
        {"n": 3},
    ]
    assert receiver.order.lanes["a-1-0"].high == 3


async def test_any_path_and_several_secrets(transport: Outbound) -> None:
    async with DevelopmentReceiver([OTHER, SECRET]).serve() as url:
        answer = await transport.send(request(f"{url}some/path?x=1", delivery(1)))
    assert answer.status == 200


async def test_without_a_secret_signatures_are_not_looked_at(transport: Outbound) -> None:
    async with DevelopmentReceiver().serve() as url:
        assert (await transport.send(request(url, delivery(1), secret=OTHER))).status == 200


async def test_a_copy_is_answered_but_processed_once(transport: Outbound) -> None:
    receiver = DevelopmentReceiver([SECRET])
    async with receiver.serve() as url:
        for attempt in (1, 2, 3):
            answer = await transport.send(request(url, delivery(1), attempt=attempt))
            assert answer.status == 200
    totals = receiver.totals()
    assert (totals.accepted, totals.duplicates, totals.order.duplicates) == (1, 2, 2)
    assert totals.good


async def test_copies_at_once_are_processed_once(transport: Outbound) -> None:
    receiver = DevelopmentReceiver([SECRET], latency_s=0.02)
    async with receiver.serve() as url:
        await asyncio.gather(*(transport.send(request(url, delivery(1))) for _ in range(10)))
    assert receiver.totals().accepted == 1


async def test_a_replay_of_what_is_here_closes_its_hole_and_is_dropped(
    transport: Outbound,
) -> None:
    """The relay gave 2 up although it had arrived, and was told to replay it."""
    seen: list[Handled] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        await transport.send(request(url, delivery(1)))
        await transport.send(request(url, delivery(3), previous=1))
        replay = delivery(4, outbox_id=2, event_id=delivery(2).event_id, replay_of=("a-1-0", 2))
        assert receiver.totals().order.holes == 1
        assert (await transport.send(request(url, replay))).status == 200
        assert receiver.totals().order.holes == 0
        late = await transport.send(request(url, delivery(2)))
    assert late.status == 200
    assert [handled.outcome for handled in seen] == [
        Outcome.ACCEPTED,
        Outcome.ACCEPTED,
        Outcome.ACCEPTED,
        Outcome.DUPLICATE,
    ]
    assert receiver.totals().good


async def test_a_lane_that_ended_is_forgotten_and_its_late_copies_are_known(
    transport: Outbound,
) -> None:
    receiver = DevelopmentReceiver([SECRET], from_start=True)
    async with receiver.serve() as url:
        await transport.send(request(url, delivery(1)))
        await transport.send(request(url, delivery(2), lane_ends=True))
        assert receiver.order.lanes == {}
        # Its answer was lost.
        again = await transport.send(request(url, delivery(2), lane_ends=True, attempt=2))
        await transport.send(request(url, delivery(1, lane="a-2-0", outbox_id=3)))
    assert again.status == 200
    assert list(receiver.order.lanes) == ["a-2-0"]
    totals = receiver.totals()
    assert (totals.accepted, totals.duplicates, totals.good) == (3, 1, True)


async def test_what_was_seen_longest_ago_is_forgotten(transport: Outbound) -> None:
    receiver = DevelopmentReceiver([SECRET], seen_max=2)
    async with receiver.serve() as url:
        for n in (1, 2, 3, 1):
            await transport.send(request(url, delivery(n)))
    assert receiver.totals().accepted == 4


# ------------------------------------------------------------------- bad weather


async def test_a_forgery_is_refused_and_changes_nothing(transport: Outbound) -> None:
    seen: list[Handled] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        forged = await transport.send(request(url, delivery(1), secret=OTHER))
        old = await transport.send(request(url, delivery(1), timestamp=1_700_000_000))
        good = request(url, delivery(1))
        lying = tuple(("X-Sequence", "9") if n == "X-Sequence" else (n, v) for n, v in good.headers)
        changed = await transport.send(Request(url, lines_of(lying), good.body))
    assert [answer.status for answer in (forged, old, changed)] == [401, 401, 400]
    assert b"secret" in forged.body
    assert b"X-Sequence" in changed.body
    assert [handled.outcome for handled in seen] == [Outcome.REJECTED] * 3
    totals = receiver.totals()
    assert (totals.rejected, totals.accepted, totals.order.received) == (3, 0, 0)
    assert not totals.good


async def test_what_a_receiver_never_takes_is_refused_and_not_taken_in(
    transport: Outbound,
) -> None:
    receiver = DevelopmentReceiver(
        [SECRET], refuse=lambda message: "not even" if message.sequence % 2 else None
    )
    async with receiver.serve() as url:
        answers = [
            await transport.send(request(url, delivery(1))),
            await transport.send(request(url, delivery(2), previous=0)),
        ]
    assert [(answer.status, answer.body) for answer in answers] == [
        (422, b"not even\n"),
        (200, b"ok\n"),
    ]
    totals = receiver.totals()
    assert (totals.refused, totals.accepted, totals.order.holes) == (1, 1, 1)
    assert totals.good


async def test_missing_numbers_show(transport: Outbound) -> None:
    receiver = DevelopmentReceiver([SECRET])
    async with receiver.serve() as url:
        await transport.send(request(url, delivery(1)))
        await transport.send(request(url, delivery(4), previous=3))
    totals = receiver.totals()
    assert (totals.order.gaps, totals.order.missing) == (1, 2)
    assert not totals.good


async def test_a_receiver_that_was_there_first_misses_the_first_ones(
    transport: Outbound,
) -> None:
    for from_start, missing in ((True, 4), (False, 0)):
        receiver = DevelopmentReceiver([SECRET], from_start=from_start)
        async with receiver.serve() as url:
            await transport.send(request(url, delivery(5)))
        assert receiver.totals().order.missing == missing


async def test_only_posts_are_deliveries(transport: Outbound) -> None:
    receiver = DevelopmentReceiver()
    async with receiver.serve() as url:
        answer = await transport.send(Request(url, "", b"", method="PUT"))
    assert (answer.status, dict(answer.headers)["Allow"]) == (405, "POST")
    assert receiver.totals().requests == 0


# ------------------------------------------------------------ failing on purpose


async def fail(
    transport: Outbound, fault: Fault, *, late: bool
) -> tuple[Answer, Handled, DevelopmentReceiver]:
    seen: list[Handled] = []
    receiver = DevelopmentReceiver(
        [SECRET],
        fail_rate=ALWAYS,
        faults=[fault],
        rng=Coin(late=late),
        on_request=seen.append,
    )
    async with receiver.serve() as url:
        answer = await transport.send(request(url, delivery(1)))
    (handled,) = seen
    return answer, handled, receiver


@pytest.mark.parametrize(
    ("fault", "status", "failure"),
    [
        (Fault.ERROR, 500, None),
        (Fault.UNAVAILABLE, 503, None),
        (Fault.RESET, None, Failure.RESET),
    ],
)
@pytest.mark.parametrize("late", [False, True])
async def test_each_fault_before_and_after_the_effect(
    transport: Outbound, fault: Fault, status: int | None, failure: Failure, late: bool
) -> None:
    answer, handled, receiver = await fail(transport, fault, late=late)
    assert (answer.status, answer.failure) == (status, failure)
    assert (handled.status, handled.fault) == (status, fault)
    totals = receiver.totals()
    if late:
        assert handled.outcome is Outcome.ACCEPTED
        assert (totals.accepted, totals.lost, totals.failed) == (1, 1, 0)
        assert handled.observation is not None
        assert handled.observation.kind is Kind.IN_ORDER
    else:
        assert handled.outcome is Outcome.FAILED
        assert (totals.accepted, totals.lost, totals.failed) == (0, 0, 1)
        assert totals.order.received == 0
    if fault is Fault.UNAVAILABLE:
        assert dict(answer.headers)["Retry-After"] == "0"


async def test_hanging_lasts_until_the_sender_gives_up(transport: Outbound) -> None:
    seen: list[Handled] = []
    receiver = DevelopmentReceiver(
        fail_rate=ALWAYS, faults=[Fault.HANG], rng=Coin(late=True), on_request=seen.append
    )
    async with receiver.serve() as url:
        sending = asyncio.create_task(transport.send(request(url, delivery(1))))
        await until(lambda: seen)
        assert not sending.done()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
    assert seen[0].outcome is Outcome.ACCEPTED


async def test_a_sender_that_tries_again_gets_everything_through_once(
    transport: Outbound, seed: int
) -> None:
    receiver = DevelopmentReceiver(
        [SECRET], fail_rate=0.5, rng=random.Random(seed), from_start=True
    )
    async with receiver.serve() as url:
        for n in range(1, 101):
            for attempt in range(1, 1000):
                answer = await transport.send(request(url, delivery(n), attempt=attempt))
                if answer.status == 200:
                    break
    totals = receiver.totals()
    assert totals.accepted == 100
    assert totals.good
    assert totals.requests == totals.accepted + totals.duplicates + totals.failed
    assert totals.failed
    assert totals.duplicates == totals.lost


async def test_the_same_seed_fails_the_same_requests(transport: Outbound) -> None:
    runs: list[list[Fault | None]] = []
    for _ in range(2):
        seen: list[Handled] = []
        receiver = DevelopmentReceiver(fail_rate=0.5, rng=random.Random(7), on_request=seen.append)
        async with receiver.serve() as url:
            for n in range(1, 41):
                await transport.send(request(url, delivery(n)))
        runs.append([handled.fault for handled in seen])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "options",
    [{"fail_rate": -0.1}, {"fail_rate": 1.1}, {"latency_s": -1}, {"fail_rate": 0.5, "faults": ()}],
)
def test_impossible_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        DevelopmentReceiver(**options)  # type: ignore[arg-type]


async def test_a_taken_port_is_one_line() -> None:
    async with DevelopmentReceiver().serve() as url:
        port = int(url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(CannotRun, match=f"127.0.0.1:{port}"):
            async with DevelopmentReceiver().serve(port=port):
                pass


async def test_a_hanging_answer_does_not_hold_up_the_end(transport: Outbound) -> None:
    seen: list[Handled] = []
    receiver = DevelopmentReceiver(fail_rate=ALWAYS, faults=[Fault.HANG], on_request=seen.append)
    async with receiver.serve() as url:
        sending = asyncio.create_task(transport.send(request(url, delivery(1))))
        await until(lambda: seen)
    assert (await sending).failure is Failure.RESET
