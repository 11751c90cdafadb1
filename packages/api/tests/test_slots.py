"""Slots of a resource: whose requests wait for whom, and requests that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.operations.endpoints import statuses
from outbox_api import database as database_module
from outbox_api import slots
from outbox_api.database import Database as Connections
from outbox_api.limits import CONNECTION_WAIT_S, REQUEST_BODY_BYTES_MAX, WAITING_MAX
from outbox_api.problem import Problem
from outbox_api.rate_limit import Holder
from outbox_api.slots import SharedSlots
from outbox_api.tenancy import stored_key
from tests.support.api import Api, make_token, serving
from tests.support.relay import current, fetchval, settings_for
from tests.support.virtual_time import run_virtual
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from tests.support.api import AttemptResult
    from tests.support.postgres import Database

HOG, ACME, GLOBEX = (("tenant", name) for name in ("hog", "acme", "globex"))


class Request:
    """A request that has its slot until it is let go."""

    def __init__(self, shared: SharedSlots, holder: Holder, served: list[Holder]) -> None:
        self.holder = holder
        self.has_slot = False
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(shared, served))

    async def _run(self, shared: SharedSlots, served: list[Holder]) -> None:
        async with shared.slot(self.holder):
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


def require_invariants(shared: SharedSlots, slots: int, requests: list[Request]) -> None:
    """What holds whenever no task can run."""
    each_max = max(1, slots // 4)
    assert shared.free + shared.held.total() == slots
    assert shared.held.total() == sum(each.has_slot for each in requests)
    assert all(held <= each_max for held in shared.held.values())
    assert all(
        queue and not any(turn.done() for turn in queue) for queue in shared.waiting.values()
    )
    for holder in shared.waiting:
        assert shared.free == 0 or shared.held[holder] == each_max, "a slot is not used"


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
        shared, requests = SharedSlots(slots, "slot"), list[Request]()
        served: list[Holder] = []
        for step, number in steps:
            # Those without "tick" or "settle" between them happen before any task runs.
            live = [each for each in requests if not each.task.done()]
            if step == "begin":
                requests.append(Request(shared, ("tenant", number % 5), served))
            elif step == "tick":
                await asyncio.sleep(0)
            elif step == "settle":
                await settle()
                require_invariants(shared, slots, requests)
            elif live and step == "end":
                live[number % len(live)].may_end.set()
            elif live:
                live[-1 - number % len(live)].task.cancel()
        await settle()
        require_invariants(shared, slots, requests)
        for each in requests:
            each.may_end.set()
        results = await asyncio.gather(*(each.task for each in requests), return_exceptions=True)
        assert {type(each) for each in results} <= {type(None), asyncio.CancelledError, Problem}
        assert (shared.free, shared.held, shared.waiting) == (slots, {}, {})
        assert not failures

    asyncio.run(run())


def test_a_tenant_with_many_requests_leaves_slots_to_others() -> None:
    async def run() -> None:
        shared, served = SharedSlots(4, "slot"), list[Holder]()
        hog = [Request(shared, HOG, served) for _ in range(WAITING_MAX + 1)]
        await settle()
        others = [Request(shared, holder, served) for holder in (ACME, GLOBEX)]
        await settle()
        assert served == [HOG, ACME, GLOBEX]
        for each in (*hog, *others):
            each.may_end.set()
        await asyncio.gather(*(each.task for each in (*hog, *others)))

    asyncio.run(run())


def test_tenants_that_wait_are_served_in_turn() -> None:
    async def run() -> None:
        shared, served = SharedSlots(8, "slot"), list[Holder]()
        running = [Request(shared, ("tenant", n // 2), served) for n in range(8)]
        waiting = [Request(shared, holder, served) for holder in (HOG, ACME) for _ in range(3)]
        await settle()
        served.clear()
        for each in running[:4]:
            each.may_end.set()
            await settle()
        assert served == [HOG, ACME, HOG, ACME]
        for each in (*running, *waiting):
            each.may_end.set()
        await asyncio.gather(*(each.task for each in (*running, *waiting)))

    run_virtual(run())  # The requests take no time.


def test_short_requests_do_not_wait_for_a_long_one_of_each_tenant() -> None:
    """With one slot, ten tenants whose requests take a second, and one whose requests are short."""

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        shared = SharedSlots(1, "slot")
        waited_s = []

        async def repeat(holder: Holder, takes_s: float) -> None:
            for _ in range(5):
                began_at = clock()
                async with shared.slot(holder):
                    if holder == ACME:
                        waited_s.append(clock() - began_at)
                    await asyncio.sleep(takes_s)

        async with asyncio.TaskGroup() as tasks:
            for n in range(10):
                tasks.create_task(repeat(("tenant", n), 0.5))
            tasks.create_task(repeat(ACME, 0.01))
        assert waited_s[0] <= 5.0
        assert max(waited_s[1:]) <= 0.5

    run_virtual(run())


def test_too_many_waiting_requests_of_a_tenant_are_refused_at_once() -> None:
    async def run() -> None:
        shared, served = SharedSlots(4, "slot"), list[Holder]()
        held = [Request(shared, HOG, served) for _ in range(WAITING_MAX + 1)]
        await settle()
        with pytest.raises(Problem, match=f"this tenant has {WAITING_MAX} requests that wait for"):
            async with shared.slot(HOG):
                pass
        async with shared.slot(ACME):
            pass
        for each in held:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in held), return_exceptions=True)
        assert shared.free == 4

    asyncio.run(run())


def test_a_wait_ends_and_names_the_requests_that_were_in_the_way() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        shared, served = SharedSlots(2, "slot"), list[Holder]()
        running = [Request(shared, holder, served) for holder in (HOG, ACME)]
        await settle()
        for holder, expected in ((HOG, 429), (GLOBEX, 503)):
            began_at = loop.time()
            with pytest.raises(Problem) as refused:
                async with shared.slot(holder):
                    pass
            assert refused.value.kind.status == expected
            assert "Retry-After" in refused.value.headers
            assert loop.time() - began_at == pytest.approx(CONNECTION_WAIT_S)
        for each in running:
            each.may_end.set()
            await each.task
        assert (shared.free, shared.waiting) == (2, {})

    run_virtual(run())


# --------------------------------------------------------------- whole API


async def tenant_api(database: Database, api: Api, tenant: str) -> Api:
    return api.with_token(await make_token(database, tenant, tenant=tenant))


@pytest.mark.one_major
@pytest.mark.system
async def test_a_tenant_that_takes_its_share_leaves_the_api_to_others(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read, at_work = asyncio.Event(), statuses.read_endpoint_statuses, 0

    async def slow(*arguments: Any, tenant: str | None = None, **options: Any) -> Any:
        nonlocal at_work
        if tenant == "hog":
            at_work += 1
            await gate.wait()
            at_work -= 1
        return await read(*arguments, tenant=tenant, **options)

    monkeypatch.setattr(statuses, "read_endpoint_statuses", slow)
    # The requests wait for as long as the test needs on a busy machine.
    monkeypatch.setattr(slots, "CONNECTION_WAIT_S", 2 * LIVE_S)
    hog = await tenant_api(database, api, "hog")
    # Another token of the same tenant has no other share.
    both = (hog, api.with_token(await make_token(database, "hog-2", tenant="hog")))
    async with asyncio.TaskGroup() as tasks:
        held = [
            tasks.create_task(both[n % 2].get("/v1/endpoint-statuses"))
            for n in range(WAITING_MAX + 1)
        ]
        await until(lambda: at_work > 0, what="the first request")
        refused = await until_refused(hog)
        assert refused.detail.startswith(
            f"this tenant has {WAITING_MAX} requests that wait for a database connection"
        )
        assert refused.headers["Retry-After"] == "1"
        for other in (api, await tenant_api(database, api, "acme")):
            assert (await other.get("/v1/endpoint-statuses")).status == 200
        assert at_work == 1
        gate.set()
    assert {each.result().status for each in held} == {200}


async def until_refused(api: Api) -> AttemptResult:
    """Send requests until one is refused; those before it wait, and are cancelled."""
    async with asyncio.timeout(LIVE_S):
        while True:
            waiting = asyncio.create_task(api.get("/v1/endpoint-statuses"))
            done, _ = await asyncio.wait([waiting], timeout=0.5)
            if done:
                return waiting.result()
            waiting.cancel()
            await asyncio.wait([waiting])


@pytest.mark.one_major
@pytest.mark.system
async def test_large_bodies_that_wait_for_a_lock_leave_slots_to_others(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(database_module.TENANT_SESSION_SETTINGS, "lock_timeout", "30000")
    hog, acme = [await tenant_api(database, api, each) for each in ("hog", "acme")]
    large = {"type": "a.b", "payload": "a" * REQUEST_BODY_BYTES_MAX}
    keys = [f"k{n}" for n in range(3)]
    path = {"search_path": "relay"}
    async with asyncio.TaskGroup() as tasks, database.connection(server_settings=path) as db:
        transaction = db.transaction()
        await transaction.start()
        for key in keys:
            await db.execute("SELECT claim_once($1)", stored_key("hog", key))
        waiting = [tasks.create_task(hog.post("/v1/events", large | {"once": key})) for key in keys]
        await until(lambda: waits_for_a_lock(database), what="the first to wait for a lock")
        for other in (acme, api):
            assert (await other.post("/v1/events", large)).status == 201
        assert not any(each.done() for each in waiting)
        await transaction.rollback()
    assert {each.result().status for each in waiting} == {201}


async def waits_for_a_lock(database: Database) -> bool:
    sql = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')"
    return bool(await fetchval(database, sql))


@pytest.mark.one_major
@pytest.mark.system
async def test_a_statement_of_a_tenant_ends_sooner_than_that_of_an_operator(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(current(settings_for(database, dsn_source="test")))
    async with connections.opened():
        for holder, long, expected in (
            (HOG, False, ("5s", "2s")),
            (HOG, True, ("30s", "10s")),
            (None, False, ("30s", "10s")),
        ):
            async with connections.connection(holder, long=long) as db:
                shown = [
                    await db.fetchval(f"SHOW {name}_timeout") for name in ("statement", "lock")
                ]
                assert tuple(shown) == expected

    async def slow(connection: Any, *_: Any, **__: Any) -> None:
        await connection.execute("SELECT pg_sleep(60)")

    monkeypatch.setitem(database_module.TENANT_SESSION_SETTINGS, "statement_timeout", "50")
    monkeypatch.setattr(statuses, "read_endpoint_statuses", slow)
    async with serving(database) as api:
        hog = await tenant_api(database, api, "hog")
        refused = await hog.get("/v1/endpoint-statuses")
        assert refused.status == 503
        assert (
            refused.detail == "the database query timed out; narrow the request, or try again later"
        )
