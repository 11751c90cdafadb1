"""What a request comes to that is called off to make room for others."""

from __future__ import annotations

import asyncio

import pytest

from outbox.core.admission.endpoint_queue import Turn
from outbox.core.admission.request_scheduler import SLOW_S, Turns
from outbox.core.model.response import Answer, Failure
from outbox.relay.delivery.admission import CALLED_OFF, Queueing
from tests.support.virtual_time import run_virtual

HEAD = Answer.of(200, 0.1, detail="the body was cut short")


async def hang(head: Answer | None) -> Answer:
    """A receiver that sends the head of an answer at the most."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if head is not None:
            raise asyncio.CancelledError(head) from None
        raise
    raise AssertionError


async def called_off(head: Answer | None) -> Answer:
    """One place, which somebody else waits for."""
    queueing = Queueing(Turns(1))
    line, other = (queueing.turns.join(None, None, None) for _ in range(2))
    turn, waiting = Turn(line), Turn(other)
    assert queueing.begin(turn)
    assert not queueing.begin(waiting)
    async with asyncio.TaskGroup() as tasks:
        begun = tasks.create_task(queueing.wait(waiting))
        answer = await queueing.send(turn, hang(head))
        queueing.end(turn, answered=True)
        assert await begun
    queueing.end(waiting, answered=True)
    queueing.close()
    return answer


def test_it_was_not_answered_in_time() -> None:
    answer = run_virtual(called_off(None))
    assert (answer.status, answer.failure, answer.detail) == (None, Failure.TIMEOUT, CALLED_OFF)
    assert answer.elapsed_s == pytest.approx(SLOW_S)


def test_what_was_taken_before_is_not_sent_again() -> None:
    """The status decides, and a body that drips after it changes nothing."""
    assert run_virtual(called_off(HEAD)) is HEAD


def test_who_is_cancelled_meanwhile_stays_cancelled() -> None:
    async def cancelled() -> None:
        queueing = Queueing(Turns(1))
        turn = Turn(queueing.turns.join(None, None, None))
        assert queueing.begin(turn)
        sending = asyncio.ensure_future(queueing.send(turn, hang(HEAD)))
        asyncio.get_running_loop().call_later(0.1, sending.cancel)
        with pytest.raises(asyncio.CancelledError):
            await sending
        queueing.end(turn, answered=False)
        assert queueing.turns.open == 0

    run_virtual(cancelled())
