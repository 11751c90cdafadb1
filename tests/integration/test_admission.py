"""The results of requests that are preempted to free a slot."""

from __future__ import annotations

import asyncio

import pytest

from outbox.core.admission.endpoint_queue import Slot
from outbox.core.admission.open_requests import FAST_LATENCY_MAX_S
from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.model.response import AttemptResult, Failure
from outbox.relay.delivery.admission import PREEMPTED_DETAIL, AdmissionQueue
from tests.support.virtual_time import run_virtual

HEAD = AttemptResult.completed(200, 0.1, detail="incomplete body: the request was cancelled")


async def hang(head: AttemptResult | None) -> AttemptResult:
    """A receiver that sends the head of a response at most."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if head is not None:
            raise asyncio.CancelledError(head) from None
        raise
    raise AssertionError


async def preempted(head: AttemptResult | None) -> AttemptResult:
    """Preempt a request that holds the only slot while another endpoint waits."""
    queueing = AdmissionQueue(RequestScheduler(1))
    line, other = (queueing.scheduler.add_endpoint(None, None, None) for _ in range(2))
    turn, waiting = Slot(line), Slot(other)
    assert queueing.begin(turn)
    assert not queueing.begin(waiting)
    async with asyncio.TaskGroup() as tasks:
        begun = tasks.create_task(queueing.wait(waiting))
        response = await queueing.send(turn, hang(head))
        queueing.end(turn, responded=True)
        assert await begun
    queueing.end(waiting, responded=True)
    queueing.close()
    return response


def test_a_preempted_request_without_a_response_is_a_timeout() -> None:
    response = run_virtual(preempted(None))
    assert (response.status, response.failure, response.detail) == (
        None,
        Failure.TIMEOUT,
        PREEMPTED_DETAIL,
    )
    assert response.elapsed_s == pytest.approx(FAST_LATENCY_MAX_S)


def test_a_preempted_request_that_was_accepted_is_a_success() -> None:
    """The status decides; a slow body after it changes nothing."""
    assert run_virtual(preempted(HEAD)) is HEAD


def test_a_cancelled_preempted_request_stays_cancelled() -> None:
    async def cancelled() -> None:
        queueing = AdmissionQueue(RequestScheduler(1))
        turn = Slot(queueing.scheduler.add_endpoint(None, None, None))
        assert queueing.begin(turn)
        sending = asyncio.ensure_future(queueing.send(turn, hang(HEAD)))
        asyncio.get_running_loop().call_later(0.1, sending.cancel)
        with pytest.raises(asyncio.CancelledError):
            await sending
        queueing.end(turn, responded=False)
        assert queueing.scheduler.open == 0

    run_virtual(cancelled())


@pytest.mark.parametrize("loop_module", ["asyncio", "uvloop"])
def test_requests_can_wait_while_a_timer_is_overdue(
    loop_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop returns another kind of handle for a time in the past, as after a long pause."""
    monkeypatch.setattr(RequestScheduler, "wake_at", lambda _: 0.0)

    async def wait_behind_an_old_request() -> list[bool]:
        queueing = AdmissionQueue(RequestScheduler(1))
        open_slot, *slots = (
            Slot(queueing.scheduler.add_endpoint(None, None, None)) for _ in range(4)
        )
        assert queueing.begin(open_slot)
        assert not any(queueing.begin(slot) for slot in slots)
        waiting = [asyncio.ensure_future(queueing.wait(slot)) for slot in slots]
        await asyncio.sleep(0)
        assert queueing.scheduler.waiting == len(slots)
        queueing.cancel_waiting(slots)
        queueing.end(open_slot, responded=False)
        queueing.close()
        return await asyncio.gather(*waiting)

    new_event_loop = pytest.importorskip(loop_module).new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(wait_behind_an_old_request()) == [False, False, False]
