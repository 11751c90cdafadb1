"""The results of requests that are preempted to free a slot."""

from __future__ import annotations

import asyncio

import pytest

from outbox.core.admission.endpoint_queue import Slot
from outbox.core.admission.request_scheduler import FAST_LATENCY_MAX_S, RequestScheduler
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
