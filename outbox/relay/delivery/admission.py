"""Waiting for a turn: `outbox.core.admission.request_scheduler` on the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import Answer, Failure

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from outbox.core.admission.endpoint_queue import Line, Turn, Why
    from outbox.core.admission.request_scheduler import Turns
    from outbox.store.endpoints import Endpoint


CALLED_OFF = "no answer yet; called off to make room for others"
PREEMPTED = "preempted"
"""Message of the cancellation that ends a request to free its slot."""


class Queueing:
    """Those who wait for their turns and those who have one, and the timer for what comes
    with the time.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        # Kept: asking for the running one is a system call (getpid) each time.
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Turn, asyncio.Future[bool]] = {}
        self._sending: dict[Turn, asyncio.Task[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, turn: Turn) -> bool:
        """Begin a request if it may be; otherwise it is to `wait`."""
        begun = self.turns.ask(turn, self._loop.time())
        if len(begun) > 1 or self._is_news:
            self.tell(begun[1:])
        return bool(begun)

    async def wait(self, turn: Turn) -> bool:
        """Wait for the turn; False: it was `dismissed`, and nothing has begun."""
        loop = self._loop
        future = self._waiting[turn] = loop.create_future()
        self._set_timer()
        try:
            begun: bool = await future
        except BaseException:
            if turn.waiting:
                del self._waiting[turn]
                self.tell(self.turns.withdraw([turn], loop.time()))
            elif turn.open:
                # It came in the very moment in which nobody wanted it any more.
                self.end(turn, answered=False)
            raise
        return begun

    async def send(self, turn: Turn, sending: Coroutine[Any, Any, Answer]) -> Answer:
        """What a request whose turn it is came to.

        Called off, it has got no answer in time, unless the head of one was there.
        """
        if turn.called_off:
            sending.close()
            return Answer.failed(Failure.TIMEOUT, CALLED_OFF, 0.0)
        task = asyncio.current_task(self._loop)
        assert task is not None
        # Not `asyncio.timeout`, whose timer costs more than the rest of a turn.
        cancelling = task.cancelling()
        self._sending[turn] = task
        try:
            return await sending
        except asyncio.CancelledError as cut:
            # Whoever else cancelled the task meanwhile has not been heard yet.
            if not turn.called_off or task.uncancel() > cancelling:
                raise
            head = next((each for each in cut.args if isinstance(each, Answer)), None)
            return head or Answer.failed(
                Failure.TIMEOUT, CALLED_OFF, self._loop.time() - turn.began_at
            )
        finally:
            del self._sending[turn]

    @staticmethod
    def in_time(turn: Turn, answer: Answer) -> bool:
        """Whether that is what came of the request, and not that it was called off."""
        return not turn.called_off or answer.failure is None

    def end(self, turn: Turn, *, answered: bool) -> None:
        """A request has ended; others may begin.

        Args:
            answered: there was an answer, so that what it took says something of its endpoint.
        """
        begun = self.turns.end(turn, self._loop.time(), answered=answered)
        if begun or self._is_news:
            self.tell(begun)

    @property
    def _is_news(self) -> bool:
        """Whether somebody waits, or is called off."""
        return bool(self._waiting or self.turns.called_off)

    def change(self, line: Line, endpoint: Endpoint) -> None:
        """An endpoint's settings are these from now on."""
        now = self._loop.time()
        limits = (endpoint.in_flight_max, endpoint.rate_per_s)
        self.tell(self.turns.change(line, endpoint.tenant, *limits, now))

    def why(self, line: Line) -> Why | None:
        """What the lanes of an endpoint wait for; None: they do not."""
        return self.turns.why(line, self._loop.time())

    def dismiss(self, turns: Iterable[Turn]) -> None:
        """Whoever waits for one of these is to ask again whether it wants it at all."""
        dismissed = [turn for turn in turns if turn.waiting]
        begun = self.turns.withdraw(dismissed, self._loop.time())
        for turn in dismissed:
            self._resolve(turn, begun=False)
        self.tell(begun)

    def tell(self, begun: Iterable[Turn]) -> None:
        """Turns have come."""
        for turn in begun:
            self._resolve(turn, begun=True)
        self._call_off()
        if self._waiting:
            self._set_timer()

    def _call_off(self) -> None:
        for turn in self.turns.take_called_off():
            # What is not being sent yet learns it when it is.
            if turn in self._sending:
                self._sending[turn].cancel(PREEMPTED)

    def _resolve(self, turn: Turn, *, begun: bool) -> None:
        future = self._waiting.pop(turn)
        # Whoever is being cancelled gives back what it was given.
        if not future.done():
            future.set_result(begun)

    def _set_timer(self) -> None:
        """One that fires too soon is no harm."""
        at = self.turns.wake_at()
        if at is None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.tell(self.turns.wake(self._loop.time()))
        self._set_timer()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
