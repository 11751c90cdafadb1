"""Processes in virtual time: each has its own event loop, and all share one clock.

This module alone decides what runs next: which of the runnable processes continues, and
when a message arrives.  A process can be frozen (SIGSTOP) and killed (SIGKILL) between any
two of its steps.  A run depends only on its seed, so nothing may depend on addresses of
objects or on hashes of strings.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine
    from contextvars import Context


class _Handle:
    """A scheduled callback."""

    __slots__ = ("_when", "args", "callback", "context")

    def __init__(
        self, callback: Callable[..., object], args: Any, context: Context | None, when: float
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self._when = when

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self._when


class _Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address."""

    def __init__(self, coroutine: Any, *, loop: Any, number: int, **rest: Any) -> None:
        self._number = number
        super().__init__(coroutine, loop=loop, **rest)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__


class Loop(asyncio.AbstractEventLoop):
    """The event loop of one process, with timers, tasks and futures only."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        # Tasks that are not done must not be collected: their clean-up would run.
        self._tasks: list[_Task] = []
        self._numbers = 0

    def time(self) -> float:
        return self._world.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context, self._world.now)
        self._world.make_ready(self._process, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context, when)
        self._world.at(when, self._process, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> _Handle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coroutine: Coroutine[Any, Any, Any], **rest: Any
    ) -> asyncio.Task[Any]:
        self._numbers += 1
        task = _Task(coroutine, loop=self, number=self._numbers, **rest)
        if len(self._tasks) > 1000:
            self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._world.on_error(self._process, context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False


class Process:
    """A process: running, frozen or dead."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.loop = Loop(world, self)  # type: ignore[abstract]
        self.ready: deque[_Handle] = deque()
        self.frozen = False
        self.dead = False
        # Called when it dies, in the order in which the operating system cleans up.
        self.on_death: list[Callable[[], None]] = []
        # Referenced for ever: if it were collected, the clean-up of its tasks would run.
        world.processes.append(self)

    def run(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task in the process."""
        return self.loop.create_task(main)

    def freeze(self) -> None:
        """SIGSTOP: messages and timers wait."""
        self.frozen = True
        self.world.not_ready(self)

    def thaw(self) -> None:
        """SIGCONT: callbacks that became due meanwhile run now; timers first or last."""
        self.frozen = False
        if self.ready:
            if self.world.rng.random() < 0.5:
                late = sorted(self.ready, key=lambda handle: handle.when())
                self.ready = deque(late)
            self.world.wake(self)

    def kill(self) -> None:
        """SIGKILL: nothing of the process runs again, not even its clean-up."""
        if self.dead:
            return
        self.dead = True
        self.world.not_ready(self)
        for clean_up in self.on_death:
            clean_up()


class World:
    """The clock and the scheduler of all processes.

    Args:
        rng: chooses among runnable processes.
    """

    EPOCH_S = 1_800_000_000.0

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.steps = 0
        self.rng = rng
        self.errors: list[str] = []
        self.processes: list[Process] = []
        self._queue: list[tuple[float, int, Process | None, Any, Any]] = []
        self._numbers = 0
        self._runnable: list[Process] = []
        # Called once, before the step of this number.
        self._at_steps: list[tuple[int, int, Callable[[], None]]] = []

    def wall(self) -> float:
        """The true time, in epoch seconds."""
        return self.EPOCH_S + self.now

    # ------------------------------------------------------------- scheduling

    def at(self, when: float, process: Process | None, callback: Any, *args: Any) -> None:
        """Schedule a callback in a process, or (None) outside of all processes."""
        self._numbers += 1
        heapq.heappush(self._queue, (max(when, self.now), self._numbers, process, callback, args))

    def after(self, delay_s: float, process: Process | None, callback: Any, *args: Any) -> None:
        """Schedule a callback after a delay."""
        self.at(self.now + delay_s, process, callback, *args)

    def at_step(self, step: int, callback: Callable[[], None]) -> None:
        """Schedule a callback before the step of this number."""
        self._numbers += 1
        heapq.heappush(self._at_steps, (step, self._numbers, callback))

    def make_ready(self, process: Process, handle: _Handle) -> None:
        if process.dead:
            return
        process.ready.append(handle)
        if len(process.ready) == 1 and not process.frozen:
            self._runnable.append(process)

    def wake(self, process: Process) -> None:
        if process not in self._runnable:
            self._runnable.append(process)

    def not_ready(self, process: Process) -> None:
        if process in self._runnable:
            self._runnable.remove(process)

    def on_error(self, process: Process, context: dict[str, Any]) -> None:
        """Record an unhandled error of a callback or task."""
        self.errors.append(
            f"{process.name}: {context.get('message')}: {context.get('exception')!r}"
        )

    # ---------------------------------------------------------------- running

    def run(self, until: float, done: Callable[[], bool] | None = None) -> bool:
        """Run until a time, or until `done` returns True; returns whether it did.

        `done` is called before each change of the time.
        """
        runnable, queue, rng = self._runnable, self._queue, self.rng
        set_running = events._set_running_loop
        while True:
            self.steps += 1
            if self._at_steps and self._at_steps[0][0] <= self.steps:
                heapq.heappop(self._at_steps)[2]()
                continue
            if runnable:
                n = int(rng.random() * len(runnable)) if len(runnable) > 1 else 0
                process = runnable[n]
                handle = process.ready.popleft()
                if not process.ready:
                    del runnable[n]
                callback = handle.callback
                if callback is None:
                    continue
                set_running(process.loop)
                try:
                    if handle.context is not None:
                        handle.context.run(callback, *handle.args)
                    else:
                        callback(*handle.args)
                except Exception as error:
                    self.on_error(process, {"message": "a callback failed", "exception": error})
                finally:
                    set_running(None)
                continue
            if done is not None and done():
                return True
            if not queue or queue[0][0] > until:
                self.now = max(self.now, until)
                return False
            when, _, into, what, args = heapq.heappop(queue)
            self.now = when
            if into is None:
                what(*args)
            elif isinstance(what, _Handle):
                if what.callback is not None:
                    self.make_ready(into, what)
            elif not into.dead:
                self.make_ready(into, _Handle(what, args, None, when))
