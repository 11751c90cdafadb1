"""Shares of a resource: whose requests wait for whom, and requests that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox_api.limits import CONNECTION_WAIT_S, WAITING_MAX
from outbox_api.problem import Problem
from outbox_api.rate_limit import Holder
from outbox_api.shares import Shares
from tests.support.virtual_time import run_virtual

HOG, ACME, GLOBEX = (("tenant", name) for name in ("hog", "acme", "globex"))


class Request:
    """A request that has its slot until it is let go."""

    def __init__(self, shares: Shares, holder: Holder, served: list[Holder]) -> None:
        self.holder = holder
        self.has_slot = False
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(shares, served))

    async def _run(self, shares: Shares, served: list[Holder]) -> None:
        async with shares.slot(self.holder):
            self.has_slot = True
            served.append(self.holder)
            try:
                await self.may_end.wait()
            finally:
                self.has_slot = False


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def require_invariants(shares: Shares, slots: int, requests: list[Request]) -> None:
    """What holds whenever no task can run."""
    each_max = max(1, slots // 4)
    assert shares.free + shares.held.total() == slots
    assert shares.held.total() == sum(each.has_slot for each in requests)
    assert all(held <= each_max for held in shares.held.values())
    assert all(
        queue and not any(turn.done() for turn in queue) for queue in shares.waiting.values()
    )
    for holder in shares.waiting:
        assert shares.free == 0 or shares.held[holder] == each_max, "a slot is not used"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "end", "cancel", "tick", "settle"]),
        st.integers(0, 40),
    ),
    max_size=60,
)


BEGUN = [("begin", 0), ("begin", 0), ("settle", 0)]
"""Requests of one tenant: the first has the slot, the other waits."""


@example([*BEGUN, ("cancel", 0), ("settle", 0)], 1)
@example([*BEGUN, ("end", 0), ("tick", 0), ("cancel", 0)], 1)  # It has just got the slot.
@example([*BEGUN, ("end", 0), ("cancel", 0)], 1)  # It is to get the slot.
@given(steps=STEPS, slots=st.sampled_from([1, 2, 4, 8]))
def test_requests_that_end_or_are_cancelled_at_any_step_lose_no_slot(
    steps: list[tuple[str, int]], slots: int
) -> None:
    async def run() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
        shares, requests = Shares(slots, "slot"), list[Request]()
        served: list[Holder] = []
        for step, number in steps:
            # Those without "tick" or "settle" between them happen before any task runs.
            live = [each for each in requests if not each.task.done()]
            if step == "begin":
                requests.append(Request(shares, ("tenant", number % 5), served))
            elif step == "tick":
                await asyncio.sleep(0)
            elif step == "settle":
                await settle()
                require_invariants(shares, slots, requests)
            elif live and step == "end":
                live[number % len(live)].may_end.set()
            elif live:
                live[-1 - number % len(live)].task.cancel()
        await settle()
        require_invariants(shares, slots, requests)
        for each in requests:
            each.may_end.set()
        results = await asyncio.gather(*(each.task for each in requests), return_exceptions=True)
        assert {type(each) for each in results} <= {type(None), asyncio.CancelledError, Problem}
        assert (shares.free, shares.held, shares.waiting) == (slots, {}, {})
        assert not failures

    asyncio.run(run())


def test_a_tenant_with_many_requests_leaves_slots_to_others() -> None:
    async def run() -> None:
        shares, served = Shares(4, "slot"), list[Holder]()
        hog = [Request(shares, HOG, served) for _ in range(WAITING_MAX + 1)]
        await settle()
        others = [Request(shares, holder, served) for holder in (ACME, GLOBEX)]
        await settle()
        assert served == [HOG, ACME, GLOBEX]
        for each in (*hog, *others):
            each.may_end.set()
        await asyncio.gather(*(each.task for each in (*hog, *others)))

    asyncio.run(run())


def test_tenants_that_wait_are_served_in_turn() -> None:
    async def run() -> None:
        shares, served = Shares(8, "slot"), list[Holder]()
        running = [Request(shares, ("tenant", n // 2), served) for n in range(8)]
        waiting = [Request(shares, holder, served) for holder in (HOG, ACME) for _ in range(3)]
        await settle()
        served.clear()
        for each in running[:4]:
            each.may_end.set()
            await settle()
        assert served == [HOG, ACME, HOG, ACME]
        for each in (*running, *waiting):
            each.may_end.set()
        await asyncio.gather(*(each.task for each in (*running, *waiting)))

    asyncio.run(run())


def test_too_many_waiting_requests_of_a_tenant_are_refused_at_once() -> None:
    async def run() -> None:
        shares, served = Shares(4, "slot"), list[Holder]()
        held = [Request(shares, HOG, served) for _ in range(WAITING_MAX + 1)]
        await settle()
        with pytest.raises(Problem, match=f"this tenant has {WAITING_MAX} requests that wait for"):
            async with shares.slot(HOG):
                pass
        async with shares.slot(ACME):
            pass
        for each in held:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in held), return_exceptions=True)
        assert shares.free == 4

    asyncio.run(run())


def test_a_wait_ends_and_says_whose_requests_were_in_the_way() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        shares, served = Shares(2, "slot"), list[Holder]()
        running = [Request(shares, holder, served) for holder in (HOG, ACME)]
        await settle()
        for holder, status in ((HOG, 429), (GLOBEX, 503)):
            began_at = loop.time()
            with pytest.raises(Problem) as refused:
                async with shares.slot(holder):
                    pass
            assert refused.value.kind.status == status
            assert "Retry-After" in refused.value.headers
            assert loop.time() - began_at == pytest.approx(CONNECTION_WAIT_S)
        for each in running:
            each.may_end.set()
            await each.task
        assert (shares.free, shares.waiting) == (2, {})

    run_virtual(run())
