"""Whole relays inside a test: real PostgreSQL and a scripted network."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.config import Settings
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.response import AttemptResult
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.relay.cluster.connections import Connections
from outbox.relay.relay import Relay
from outbox.store.cluster.sessions import session_label
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox_doctor.verify.audit import run_checks
from tests.support.runs import send_run
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from outbox.core.model.start import Start
    from outbox.destinations.broker import BrokerFactory
    from outbox.destinations.interface import Following, Request, Transport
    from outbox.operations.endpoints.changes import NewEndpoint
    from outbox.store.cluster.replicas import ReplicaStore
    from tests.support.postgres import Database

# Whether $1 relays run, and each owns its share of the endpoints.
SHARED_OUT = """
SELECT count(*) = $1 AND max(owned) - min(owned) <= 1
       AND NOT EXISTS (SELECT FROM ownership WHERE replica_id IS NULL)
  FROM (SELECT count(o.endpoint_id) AS owned
          FROM replica r LEFT JOIN ownership o ON o.replica_id = r.id
         GROUP BY r.id) _
"""
# Registers "shop-1" in any version of the schema, as if it ran; and ends all leases.
ADD_REPLICA = """
INSERT INTO relay.replica (label, name, version, lease_s, expires_at)
VALUES ('outbox-relay:1', 'shop-1', '0', 60, clock_timestamp() + interval '60 s')
"""
END_LEASES = "UPDATE relay.replica SET expires_at = clock_timestamp()"
QUICK_RETRY = {"base_s": 0.02, "factor": 2.0, "cap_s": 0.1, "attempts_max": 4}
# No second attempt during a test. Full jitter would draw a pause of a second now and then.
SLOW_RETRY = {"base_s": 3600.0, "cap_s": 3600.0, "jitter": "none"}

OK = AttemptResult.completed(204, 0.001)
BUSY = AttemptResult.completed(503, 0.001, body=b"busy")
RAISED = AttemptResult.completed(500, 0.001, body=b"no total")
REFUSED = AttemptResult.completed(400, 0.001, body=b"no")


@dataclass(frozen=True)
class Sent:
    """A request as a receiver sees it."""

    url: str
    lane: str
    seq: int
    previous_seq: int
    attempt: int
    delivery: str
    body: Any
    """Parsed JSON; bytes of another content type."""
    headers: dict[str, str]
    """Headers by lower-case name."""
    request: Request

    @classmethod
    def from_request(cls, request: Request) -> Sent:
        h = {name.lower(): value for name, value in request.headers}
        prefix = next(n for n in h if n.endswith("-delivery")).removesuffix("delivery")
        return cls(
            request.recipient.url,
            h[f"{prefix}lane"],
            int(h[f"{prefix}sequence"]),
            int(h[f"{prefix}previous-sequence"]),
            int(h[f"{prefix}attempt"]),
            h[f"{prefix}delivery"],
            orjson.loads(request.body) if "json" in h["content-type"] else request.body,
            h,
            request,
        )


class Network:
    """A transport that responds from a script and records requests."""

    def __init__(
        self, script: Callable[[Sent], AttemptResult | Awaitable[AttemptResult]] | None = None
    ) -> None:
        self.script = script or (lambda _: OK)
        self.sent: list[Sent] = []
        self.accepted: list[Sent] = []
        self.in_flight: dict[str, int] = defaultdict(int)
        self.in_flight_max: dict[str, int] = defaultdict(int)

    async def send(
        self,
        request: Request,
        following: Following | None = None,
        before_write: Callable[[], object] | None = None,
    ) -> AttemptResult:
        return await send_run(self._send, request, following, before_write)

    async def _send(self, request: Request) -> AttemptResult:
        sent = Sent.from_request(request)
        self.sent.append(sent)
        self.in_flight[sent.lane] += 1
        self.in_flight_max[sent.lane] = max(
            self.in_flight_max[sent.lane], self.in_flight[sent.lane]
        )
        try:
            response = self.script(sent)
            if not isinstance(response, AttemptResult):
                response = await response
        finally:
            self.in_flight[sent.lane] -= 1
        if response.status is not None and 200 <= response.status <= 299:
            self.accepted.append(sent)
        return response

    async def aclose(self) -> None:
        """Do nothing."""

    def data(self) -> list[Any]:
        """The accepted payloads, in order."""
        return [sent.body["data"] for sent in self.accepted]


async def add_endpoint(
    database: Database, name: str = "shop", *, start: Start | None = None, **options: Any
) -> NewEndpoint:
    """Add an endpoint with one lane and a fast retry schedule."""
    async with database.at_hand() as connection:
        values = {
            "name": name,
            "url": f"http://receiver.test/{name}",
            "lanes": 1,
            "retry": QUICK_RETRY,
        }
        settings = EndpointSettings.from_dict(values | options)
        return await endpoint_changes.add_endpoint(
            connection, "relay", settings, actor="test", start=start
        )


async def publish(database: Database, *payloads: Any, type: str = "a.b", **columns: Any) -> None:  # noqa: A002
    """Publish payloads in one transaction each."""
    async with database.at_hand() as connection:
        for payload in payloads:
            names = ["type", "payload", *columns]
            marks = ", ".join(f"${n}" for n in range(1, len(names) + 1))
            await connection.execute(
                f"INSERT INTO outbox ({', '.join(names)}) VALUES ({marks})",
                type,
                orjson.dumps(payload).decode(),
                *columns.values(),
            )


def settings_for(database: Database, **settings: Any) -> Settings:
    """The settings of a relay in a test."""
    given: Mapping[str, Any] = {"dsn": database.dsn, "lease_s": 2.0, "drain_s": 5.0, **settings}
    return Settings(**given)


def current(values: Settings) -> CurrentSettings:
    """Settings with the address that they name, as a process has them."""
    return CurrentSettings(values, dsn.from_settings(values))


def relay(
    database: Database,
    transport: Transport,
    *,
    name: str | None = None,
    brokers: BrokerFactory | None = None,
    **settings: Any,
) -> Relay:
    """A relay that is not started."""
    values = settings_for(database, **settings)
    return Relay(transport, connections_for(values), name=name, brokers=brokers)


def connections_for(values: Settings) -> Connections:
    """The connections of a relay with these settings."""
    address = dsn.parse(values.dsn.get_secret_value(), source="test", env={})
    return Connections(CurrentSettings(values, address))


async def register(
    store: ReplicaStore,
    lease_s: float = 60.0,
    *,
    name: str = "test",
    label: str | None = None,
    sequencer_pid: int | None = None,
    keys: Sequence[str] = (),
) -> int:
    """Register a replica without a relay."""
    label = label or session_label(int.from_bytes(os.urandom(4)))
    return await store.register(label, name, "0", lease_s, sequencer_pid, keys)


@asynccontextmanager
async def running(
    database: Database, transport: Transport, **settings: Any
) -> AsyncIterator[Relay]:
    """A running relay, drained at the end."""
    worker = relay(database, transport, **settings)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
        if task.done():
            task.result()
    finally:
        worker.stop()
        await task


def owned_endpoint(worker: Relay) -> Any:
    """The only endpoint of a running relay, as the relay knows it now."""
    assert worker._session is not None
    assert worker._session.running is not None
    (runtime,) = worker._session.running.dispatcher.owned()
    return runtime


_names = itertools.count(1)

LAPSE = "UPDATE replica SET lease_s = 0.01, renewals = renewals + 1 WHERE name = $1"
"""Ends a lease in the view of every other replica: each measures it from the last renewal."""


@asynccontextmanager
async def killed_at_the_end(
    database: Database, network: Network, *, lapse: bool = True, **settings: Any
) -> AsyncIterator[Relay]:
    """A relay that ends without clean-up, as by kill -9.

    Args:
        lapse: let its lease end at once, so that its successor does not wait for it.
    """
    name = f"killed-{next(_names)}"
    worker = relay(database, network, name=name, **settings)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if lapse:
            await fetchval(database, LAPSE, name)


async def exceptions(database: Database) -> dict[str, tuple[str, ...]]:
    """The exceptions that `outbox verify` would report."""
    async with database.at_hand() as connection:
        return {f.name: f.examples async for f in run_checks(connection) if f.violations}


async def fetchval(database: Database, sql: str, *arguments: Any) -> Any:
    async with database.at_hand() as connection:
        return await connection.fetchval(sql, *arguments)


async def remove_events(database: Database, condition: str = "true") -> None:
    """Delete events as damage; it is refused without the setting."""
    async with database.at_hand() as connection:
        await connection.execute(
            f"SET LOCAL relay.remove = 'on'; DELETE FROM outbox WHERE {condition}"
        )


async def shared_out(database: Database, relays: int) -> bool:
    """Whether this many relays run, and each owns its share of the endpoints."""
    return bool(await fetchval(database, SHARED_OUT, relays))


async def all_ended(database: Database, timeout_s: float = 60) -> None:
    """Wait until every event is sequenced and every delivery has ended."""
    sql = """
        SELECT (SELECT coalesce(max(id), 0) FROM outbox)
               <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
           AND NOT EXISTS (
               SELECT FROM outbox o, (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) newest
                WHERE young @> o.id OR EXISTS (SELECT FROM gap WHERE o.id BETWEEN lo AND hi))
           AND NOT EXISTS (SELECT FROM replay_job_endpoint WHERE ended_at IS NULL)
           AND NOT EXISTS (
               SELECT FROM delivery d WHERE NOT EXISTS (
                   SELECT FROM attempt a WHERE a.lane_id = d.lane_id AND a.seq = d.seq
                      AND a.outcome = 'delivered')
                 AND NOT EXISTS (
                   SELECT FROM dead_letter x
                    WHERE x.lane_id = d.lane_id AND d.seq BETWEEN x.seq AND x.to_seq))
    """
    async with database.at_hand() as connection:
        await until(lambda: connection.fetchval(sql), timeout_s, "all deliveries to end")
