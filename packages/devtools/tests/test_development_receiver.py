from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, get_args

import pytest

from outbox.core.model.headers import format_lines
from outbox.core.model.message_format import FormatName
from outbox.core.model.response import AttemptResult, Failure
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.errors import CannotRun, UsageError
from outbox.network.egress import EgressPolicy
from outbox.receiver.inbox import memory
from outbox.receiver.lane_order import OrderKind
from outbox_devtools.development_receiver import (
    DevelopmentReceiver,
    HandledOutcome,
    HandledRequest,
    OrderTotals,
    ReceiverFault,
)
from tests.receiver.deliveries import OTHER, SECRET, delivery, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.receiver.proxy import ProxiedResponse

ALWAYS = 1.0


@pytest.fixture
async def transport() -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(EgressPolicy(["127.0.0.0/8"]))
    yield transport
    await transport.aclose()


class Coin(random.Random):
    """A random source that always fails; `late` selects a failure after the effect."""

    def __init__(self, *, late: bool) -> None:
        super().__init__(0)
        self._late = late

    def random(self) -> float:
        return 0.0 if self._late else 0.75


# ----------------------------------------------------------------- good weather


@pytest.mark.system
async def test_deliveries_are_verified_counted_and_shown(transport: HttpTransport) -> None:
    seen: list[HandledRequest] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        for n in (1, 2, 3):
            response = await transport.send(request(url, delivery(n)))
            assert (response.status, response.body) == (200, b"ok\n")
    totals = receiver.totals()
    assert (totals.requests, totals.accepted) == (3, 3)
    assert totals.good
    assert [handled.outcome for handled in seen] == [HandledOutcome.ACCEPTED] * 3
    assert [handled.message.data for handled in seen if handled.message] == [
        {"n": 1},
        {"n": 2},
        {"n": 3},
    ]
    assert receiver.lanes()["a-1-0"].state.high == 3


@pytest.mark.system
@pytest.mark.parametrize("name", get_args(FormatName))
async def test_each_format_is_verified_as_a_whole(
    transport: HttpTransport, name: FormatName
) -> None:
    receiver = DevelopmentReceiver([SECRET])
    async with receiver.serve() as url:
        for which in (delivery(1), delivery(2)):
            true = request(url, which, format_name=name)
            forged = true._replace(lines=true.lines.replace("X-Event: order", "X-Event: cart"))
            added = f"{true.lines}webhook-metadata-signature: v1,AAAA\r\n"
            for wrong in (forged, true._replace(lines=added)):
                assert (await transport.send(wrong)).status in (400, 401)
            assert (await transport.send(true)).status == 200
    assert receiver.totals().accepted == 2


@pytest.mark.system
async def test_any_path_and_several_secrets(transport: HttpTransport) -> None:
    async with DevelopmentReceiver([OTHER, SECRET]).serve() as url:
        response = await transport.send(request(f"{url}some/path?x=1", delivery(1)))
    assert response.status == 200


@pytest.mark.system
async def test_without_a_secret_signatures_are_not_verified(transport: HttpTransport) -> None:
    async with DevelopmentReceiver().serve() as url:
        assert (await transport.send(request(url, delivery(1), secret=OTHER))).status == 200


@pytest.mark.system
async def test_a_copy_gets_2xx_but_is_processed_once(transport: HttpTransport) -> None:
    receiver = DevelopmentReceiver([SECRET])
    async with receiver.serve() as url:
        for attempt in (1, 2, 3):
            response = await transport.send(request(url, delivery(1), attempt=attempt))
            assert response.status == 200
    totals = receiver.totals()
    assert (totals.accepted, totals.duplicates, totals.order.duplicates) == (1, 2, 2)
    assert totals.good


@pytest.mark.system
async def test_concurrent_copies_are_processed_once(transport: HttpTransport) -> None:
    receiver = DevelopmentReceiver([SECRET], latency_s=0.02)
    async with receiver.serve() as url:
        await asyncio.gather(*(transport.send(request(url, delivery(1))) for _ in range(10)))
    assert receiver.totals().accepted == 1


@pytest.mark.system
async def test_a_replay_of_a_processed_event_closes_its_hole_and_is_dropped(
    transport: HttpTransport,
) -> None:
    """The relay dead-lettered 2 although it had arrived, and replays it."""
    seen: list[HandledRequest] = []
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
        HandledOutcome.ACCEPTED,
        HandledOutcome.ACCEPTED,
        HandledOutcome.ACCEPTED,
        HandledOutcome.DUPLICATE,
    ]
    assert receiver.totals().good


@pytest.mark.system
async def test_late_copies_in_an_ended_lane_are_duplicates(transport: HttpTransport) -> None:
    receiver = DevelopmentReceiver([SECRET], from_start=True)
    async with receiver.serve() as url:
        await transport.send(request(url, delivery(1)))
        await transport.send(request(url, delivery(2), lane_ends=True))
        # Its response was lost.
        again = await transport.send(request(url, delivery(2), lane_ends=True, attempt=2))
        await transport.send(request(url, delivery(1, lane="a-2-0", outbox_id=3)))
    assert again.status == 200
    assert {name: lane.state.ended for name, lane in receiver.lanes().items()} == {
        "a-1-0": True,
        "a-2-0": False,
    }
    totals = receiver.totals()
    assert (totals.accepted, totals.duplicates, totals.good) == (3, 1, True)


@pytest.mark.system
async def test_a_copy_is_a_duplicate_after_its_id_was_forgotten(
    transport: HttpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SEEN_MAX", 2)
    receiver = DevelopmentReceiver([SECRET])
    now = time.time()
    async with receiver.serve() as url:
        for n in (1, 2, 3, 1):
            await transport.send(request(url, delivery(n, published_at=now)))
    totals = receiver.totals()
    assert (totals.accepted, totals.duplicates, totals.good) == (3, 1, True)


# ------------------------------------------------------------------- bad weather


@pytest.mark.system
async def test_a_forgery_is_refused_and_changes_nothing(transport: HttpTransport) -> None:
    seen: list[HandledRequest] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        forged = await transport.send(request(url, delivery(1), secret=OTHER))
        old = await transport.send(request(url, delivery(1), timestamp=1_700_000_000))
        good = request(url, delivery(1))
        lying = tuple(("X-Sequence", "9") if n == "X-Sequence" else (n, v) for n, v in good.headers)
        changed = await transport.send(Request(Recipient(url), format_lines(lying), good.body))
    assert [response.status for response in (forged, old, changed)] == [401, 503, 400]
    assert b"secret" in forged.body
    assert b"X-Sequence" in changed.body
    assert [handled.outcome for handled in seen] == [HandledOutcome.REJECTED] * 3
    totals = receiver.totals()
    assert (totals.rejected, totals.accepted, totals.order.received) == (3, 0, 0)
    assert not totals.good


@pytest.mark.system
async def test_each_kind_of_order_is_counted(transport: HttpTransport) -> None:
    seen: list[HandledRequest] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        pairs = [(1, 0), (2, 1), (2, 1), (5, 4), (4, 3), (7, 5), (6, 5), (9, 7)]
        for n, previous in pairs:
            await transport.send(request(url, delivery(n), previous=previous))
        other = await transport.send(request(url, delivery(9, outbox_id=77), previous=7))
        await transport.send(request(url, delivery(50, lane="a-1-1")))
    assert other.status == 200
    assert [handled.outcome for handled in seen[-2:]] == [
        HandledOutcome.CONFLICT,
        HandledOutcome.ACCEPTED,
    ]
    totals = receiver.totals()
    assert totals.order == OrderTotals(
        received=10, duplicates=1, gaps=1, out_of_order=1, late=1, conflicts=1, missing=1, holes=1
    )
    assert (totals.requests, totals.accepted, totals.duplicates) == (10, 8, 1)
    assert not totals.good


@pytest.mark.system
async def test_missing_sequences_are_reported(transport: HttpTransport) -> None:
    receiver = DevelopmentReceiver([SECRET])
    async with receiver.serve() as url:
        await transport.send(request(url, delivery(1)))
        await transport.send(request(url, delivery(4), previous=3))
    totals = receiver.totals()
    assert (totals.order.gaps, totals.order.missing) == (1, 2)
    assert not totals.good


@pytest.mark.system
async def test_with_from_start_the_first_deliveries_are_missing(
    transport: HttpTransport,
) -> None:
    for from_start, missing in ((True, 4), (False, 0)):
        receiver = DevelopmentReceiver([SECRET], from_start=from_start)
        async with receiver.serve() as url:
            await transport.send(request(url, delivery(5)))
        assert receiver.totals().order.missing == missing


@pytest.mark.system
async def test_only_posts_are_deliveries(transport: HttpTransport) -> None:
    receiver = DevelopmentReceiver()
    async with receiver.serve() as url:
        response = await transport.send(Request(Recipient(url, "PUT"), "", b""))
    assert (response.status, dict(response.headers)["Allow"]) == (405, "POST")
    assert receiver.totals().requests == 0


# ------------------------------------------------------------ injected faults


async def fail(
    transport: HttpTransport, fault: ReceiverFault, *, late: bool
) -> tuple[AttemptResult, HandledRequest, DevelopmentReceiver]:
    seen: list[HandledRequest] = []
    receiver = DevelopmentReceiver(
        [SECRET],
        fail_rate=ALWAYS,
        faults=[fault],
        rng=Coin(late=late),
        on_request=seen.append,
    )
    async with receiver.serve() as url:
        response = await transport.send(request(url, delivery(1)))
    (handled,) = seen
    return response, handled, receiver


@pytest.mark.system
@pytest.mark.parametrize(
    ("fault", "status", "failure"),
    [
        (ReceiverFault.ERROR, 500, None),
        (ReceiverFault.UNAVAILABLE, 503, None),
        (ReceiverFault.RESET, None, Failure.RESET),
    ],
)
@pytest.mark.parametrize("late", [False, True])
async def test_each_fault_before_and_after_the_effect(
    transport: HttpTransport,
    fault: ReceiverFault,
    status: int | None,
    failure: Failure,
    late: bool,
) -> None:
    response, handled, receiver = await fail(transport, fault, late=late)
    assert (response.status, response.failure) == (status, failure)
    assert (handled.status, handled.fault) == (status, fault)
    totals = receiver.totals()
    if late:
        assert handled.outcome is HandledOutcome.ACCEPTED
        assert (totals.accepted, totals.lost, totals.failed) == (1, 1, 0)
        assert handled.observation is not None
        assert handled.observation.kind is OrderKind.IN_ORDER
    else:
        assert handled.outcome is HandledOutcome.FAILED
        assert (totals.accepted, totals.lost, totals.failed) == (0, 0, 1)
        assert totals.order.received == 0
    if fault is ReceiverFault.UNAVAILABLE:
        assert dict(response.headers)["Retry-After"] == "0"


@pytest.mark.system
async def test_a_retrying_sender_delivers_everything_once(
    transport: HttpTransport, seed: int
) -> None:
    receiver = DevelopmentReceiver(
        [SECRET], fail_rate=0.5, rng=random.Random(seed), from_start=True
    )
    async with receiver.serve() as url:
        for n in range(1, 101):
            for attempt in range(1, 1000):
                response = await transport.send(request(url, delivery(n), attempt=attempt))
                if response.status == 200:
                    break
    totals = receiver.totals()
    assert totals.accepted == 100
    assert totals.good
    assert totals.requests == totals.accepted + totals.duplicates + totals.failed
    assert totals.failed
    assert totals.duplicates == totals.lost


@pytest.mark.system
async def test_the_same_seed_fails_the_same_requests(transport: HttpTransport) -> None:
    runs: list[list[ReceiverFault | None]] = []
    for _ in range(2):
        seen: list[HandledRequest] = []
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
def test_invalid_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        DevelopmentReceiver(**options)  # type: ignore[arg-type]


@pytest.mark.system
async def test_a_port_in_use_is_a_one_line_error() -> None:
    async with DevelopmentReceiver().serve() as url:
        port = int(url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(CannotRun, match=f"127.0.0.1:{port}"):
            async with DevelopmentReceiver().serve(port=port):
                pass


@pytest.mark.slow
@pytest.mark.system
async def test_a_hanging_response_does_not_delay_the_shutdown(transport: HttpTransport) -> None:
    forwarded = asyncio.Event()

    async def hang(*_: object) -> ProxiedResponse:
        forwarded.set()
        response: asyncio.Future[ProxiedResponse] = asyncio.Future()
        return await response

    async with DevelopmentReceiver(forward=hang).serve() as url:
        sending = asyncio.create_task(transport.send(request(url, delivery(1))))
        await forwarded.wait()
    assert (await sending).failure is Failure.RESET
