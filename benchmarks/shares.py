"""Response times of the API for others while one tenant takes as much of a resource as it can.

For each resource, another tenant and the operator repeat a request that needs the same, and wait
for each response: first alone, then beside a process that only computes, then beside the hostile
tenant. The target compares the last two, because on a machine whose cores are busy everything takes
longer, whoever keeps them busy. The relay is idle, and the clients have a lower priority.

A request that was refused or has no response yet counts with its time.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.api import until_served
from benchmarks.figures import Rounds, Row, Target, percentile
from benchmarks.scale.crowd import Crowd, write
from benchmarks.stage import child, search, until_true
from outbox_api.tenancy import stored_key
from tests.support.api import make_token
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from benchmarks.stage import Child, Stage
    from tests.support.postgres import Database

HOG, OTHER = "hog", "acme"
OPERATOR = "operator"
CROWD, QUICK_CROWD = Crowd(60, 1024), Crowd(4, 16)
EVENTS, QUICK_EVENTS = 500_000, 1_000
PHASE_S, QUICK_PHASE_S = 12.0, 0.5
"""On main, a request that finds no connection is refused after 10 s."""
PAUSE_S = 0.02
RETRY_S, HASTY_RETRY_S = 1.0, 0.1
"""When a client that was refused sends its next request: as Retry-After says, or sooner."""
P99 = 0.99
TARGET = Target("at most", 1.5)
ALONE, COMPUTING, BESIDE = "alone", "beside a process that computes", "beside the hostile tenant"
LOCKED = "locked"
"""An idempotency key of the hostile tenant that another session has claimed, and not committed."""
LARGE = {"type": "a.b", "payload": "a" * 200_000}
COSTLY = {"type": "a.b", "payload": [[]] * 60_000}

ADD_EVENTS = """
INSERT INTO outbox (type, payload) SELECT 'none.n', '{}' FROM generate_series(1, $1)
"""
GIVE_TO_TENANT = (
    "UPDATE endpoint SET tenant = 'hog'",
    "UPDATE subscription SET tenant = 'hog'",
    "VACUUM ANALYZE",
)
ALL_SEQUENCED = "SELECT (SELECT max(high) FROM batch) >= (SELECT max(id) FROM outbox)"


@dataclass(frozen=True, slots=True)
class Request:
    """A request that clients repeat."""

    path: str
    method: str = "POST"
    body: dict[str, Any] | None = field(default_factory=dict)

    def command(
        self, url: str, token: str, clients: int = 1, refused_pause_s: float = RETRY_S
    ) -> dict[str, Any]:
        """The command for the process of its clients."""
        return {
            "url": url,
            "token": token,
            "clients": clients,
            "method": self.method,
            "path": self.path,
            "body": self.body,
            "pause_s": PAUSE_S if clients == 1 else 0.0,
            "refused_pause_s": refused_pause_s,
        }


PUBLISH = Request("/v1/events", body={"type": "a.b"})
PUBLISH_LARGE = Request("/v1/events", body={**LARGE, "once": "own"})


@dataclass(frozen=True, slots=True)
class Attack:
    """What the hostile tenant does, and what others do meanwhile."""

    name: str
    clients: int
    hostile: Request
    other: Request
    operator: Request
    refused_pause_s: float = RETRY_S


STATUSES = Request("/v1/endpoint-statuses?limit=1000", "GET", None)
ATTACKS = (
    Attack("connections", 60, STATUSES, PUBLISH, PUBLISH),
    Attack("refusals", 60, STATUSES, PUBLISH, PUBLISH, HASTY_RETRY_S),
    Attack(
        "long requests",
        30,
        Request("/v1/erase"),
        Request("/v1/erase"),
        Request("/v1/doctor", "GET", None),
    ),
    Attack(
        "large bodies",
        30,
        Request("/v1/events", body={**COSTLY, "once": "own"}),
        PUBLISH_LARGE,
        PUBLISH_LARGE,
    ),
    Attack(
        "waits for locks",
        30,
        Request("/v1/events", body={**LARGE, "once": LOCKED}),
        PUBLISH_LARGE,
        PUBLISH_LARGE,
    ),
)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run each attack in each round."""
    crowd, events = (QUICK_CROWD, QUICK_EVENTS) if quick else (CROWD, EVENTS)
    return await run(stage, rounds, crowd, events, QUICK_PHASE_S if quick else PHASE_S)


async def run(stage: Stage, rounds: int, crowd: Crowd, events: int, phase_s: float) -> list[Row]:
    """Run with other numbers."""
    found = {(attack.name, who): Rounds() for attack in ATTACKS for who in (OTHER, OPERATOR)}
    for number in range(rounds):
        async with AsyncExitStack() as stack:
            database = await stack.enter_async_context(stage.server.database())
            connection = await stack.enter_async_context(search(database))
            url = await stack.enter_async_context(_served(stage, database, connection, crowd))
            await connection.execute(ADD_EVENTS, events, timeout=600)
            await until_true(lambda: connection.fetchval(ALL_SEQUENCED), [])  # noqa: B023
            await connection.execute("VACUUM ANALYZE", timeout=600)
            tokens = {
                HOG: await make_token(database, HOG, tenant=HOG),
                OTHER: await make_token(database, OTHER, tenant=OTHER),
                OPERATOR: await make_token(database, OPERATOR),
            }
            holding = await stack.enter_async_context(search(database))
            await stack.enter_async_context(holding.transaction())
            await holding.execute("SELECT claim_once($1)", stored_key(HOG, LOCKED))
            for attack in ATTACKS:
                described = await _attack(attack, url, tokens, phase_s, found)
                stage.say(f"shares, round {number + 1} of {rounds}, {attack.name}: {described}")
    return [
        row for attack in ATTACKS for who in (OTHER, OPERATOR) for row in _rows(attack, who, found)
    ]


def _rows(attack: Attack, who: str, found: dict[tuple[str, str], Rounds]) -> list[Row]:
    samples = found[attack.name, who]
    subject = "another tenant's p99" if who == OTHER else "the operator's p99"
    name = f"{subject}, hostile tenant: {attack.name}"
    ours = samples.samples_of(BESIDE)
    return [
        Row("shares", name, "ms", ours, ALONE, samples.samples_of(ALONE)),
        Row("shares", name, "ms", ours, COMPUTING, samples.samples_of(COMPUTING), target=TARGET),
    ]


@asynccontextmanager
async def _served(
    stage: Stage, database: Database, connection: Connection[Any], crowd: Crowd
) -> AsyncIterator[str]:
    """Run a relay with its API, whose hostile tenant has all endpoints; yields the API's URL."""
    await write(connection, stage.urls["http"], crowd)
    for sql in GIVE_TO_TENANT:
        await connection.execute(sql, timeout=600)
    admin = f"127.0.0.1:{free_port()}"
    async with stage.relay(database, OUTBOX_ADMIN=admin) as relay:
        await until_served(relay, admin)
        yield f"http://{admin}"


async def _attack(
    attack: Attack,
    url: str,
    tokens: dict[str, str],
    phase_s: float,
    found: dict[tuple[str, str], Rounds],
) -> str:
    """Measure others without and with an attack; returns a description of their p99."""
    described = []
    async with AsyncExitStack() as stack:
        measured = {}
        for who, request in ((OTHER, attack.other), (OPERATOR, attack.operator)):
            clients = await stack.enter_async_context(child("share_clients"))
            clients.send_command(**request.command(url, tokens[who]))
            await clients.response()
            measured[who] = clients
        for phase in (ALONE, COMPUTING, BESIDE):
            async with AsyncExitStack() as beside:
                hostile = None
                if phase == COMPUTING:
                    await (await beside.enter_async_context(child("computing"))).response()
                elif phase == BESIDE:
                    hostile = await beside.enter_async_context(child("share_clients"))
                    command = attack.hostile.command(
                        url, tokens[HOG], attack.clients, attack.refused_pause_s
                    )
                    hostile.send_command(**command)
                    await hostile.response()
                for clients in measured.values():
                    await _report(clients)
                await asyncio.sleep(phase_s)
                for who, clients in measured.items():
                    seen = await _report(clients)
                    p99 = percentile(seen["ms"], P99)
                    found[attack.name, who].add(phase, p99)
                    described.append(f"{who} {phase} {p99:,.1f} ms {seen['statuses']}")
                if hostile is not None:
                    described.append(f"{HOG} {(await _report(hostile))['statuses']}")
    return "; ".join(described)


async def _report(clients: Child) -> dict[str, Any]:
    clients.send_command(how="many")
    seen: dict[str, Any] = await clients.response()
    return seen
