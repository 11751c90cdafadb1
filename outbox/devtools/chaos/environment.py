"""The run's stage: a schema of its own, endpoints, receivers and relays."""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.signature import parse_secret
from outbox.core.model.endpoint import EndpointSettings
from outbox.core.model.retry_policy import RetryPolicy
from outbox.devtools.chaos import queries
from outbox.devtools.chaos.control import Control
from outbox.devtools.chaos.ledger import Books
from outbox.devtools.chaos.plan import CONTROL_CONNECTIONS, LANES
from outbox.devtools.chaos.producers import Producers
from outbox.devtools.chaos.receivers import Receivers
from outbox.devtools.chaos.relays import Fleet
from outbox.devtools.embedded import EmbeddedPostgres
from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.operations import endpoint_changes
from outbox.receiver.proxy import forwarding
from outbox.store.connection import dsn
from outbox.store.connection.connect import TROUBLE, connect
from outbox.store.connection.migrate import migrate
from outbox.store.routing_change import change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from uuid import UUID

    from asyncpg import Connection

    from outbox.devtools.chaos.plan import Plan
    from outbox.store.connection.dsn import Dsn

ACTOR = "outbox-prove"
GROUPS_MAX = 8
CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 3.0
FORWARD_TIMEOUT_S = 15.0
# It must not end by itself: what the receivers refuse for a while is owed.
RETRY = RetryPolicy(base_s=0.05, factor=2.0, cap_s=2.0, attempts_max=10_000)
DROP_WITHIN_S = 15.0
CLOCK_SAMPLES = 5


@dataclass(slots=True)
class Stage:
    """Everything that is set up."""

    plan: Plan
    postgres: EmbeddedPostgres | None
    dsn: Dsn
    server_version: str
    control: Control
    books: Books
    receivers: Receivers
    fleet: Fleet
    producers: Producers
    clock_offset_s: float
    """What is added to the database's time to get the run's."""
    directory: Path
    endpoint_ids: dict[UUID, int] = field(default_factory=dict)
    subscribers: dict[int, int] = field(default_factory=dict)
    """Endpoints that were added later, and whose events they get."""

    async def add_endpoints(self, connection: Connection[Any], numbers: range) -> None:
        """Endpoints for events of their own."""
        async with change(connection, self.plan.schema) as from_batch:
            for number in numbers:
                settings = self._settings(number, number, LANES)
                added = await endpoint_changes.add_in(connection, from_batch, settings, ACTOR)
                self._added(number, added)

    async def add_subscriber(self, connection: Connection[Any], source: int) -> int:
        """One more endpoint for another one's events; returns its number."""
        number = self.plan.endpoints + len(self.subscribers)
        # Known before it can get anything.
        self.subscribers[number] = source
        settings = self._settings(number, source, LANES)
        async with change(connection, self.plan.schema) as from_batch:
            added = await endpoint_changes.add_in(connection, from_batch, settings, ACTOR)
            # Before the commit, after which deliveries may come at once.
            self._added(number, added)
        return number

    def _settings(self, number: int, source: int, lanes: int) -> EndpointSettings:
        timeout_s = ANSWER_TIMEOUT_S if self.plan.receiver is None else FORWARD_TIMEOUT_S
        return EndpointSettings(
            name=f"e{number}",
            url=self.receivers.add(number),
            types=(f"e{source}.*",),
            lanes=lanes,
            retry=RETRY,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            total_timeout_s=timeout_s,
        )

    def _added(self, number: int, added: endpoint_changes.NewEndpoint) -> None:
        self.endpoint_ids[added.id] = number
        self.receivers.desk(number).secret = parse_secret(added.secret)


@asynccontextmanager
async def stage(
    plan: Plan,
    address: Dsn | None,
    secret: bytes | None,
    *,
    keep: bool,
    tell: Callable[[str], None],
) -> AsyncIterator[Stage]:
    """Set everything up, and take it down again whatever happens.

    Args:
        address: None: on an embedded database.
        secret: what deliveries that are passed on are signed with.

    Raises:
        CannotRun: no database, no right, no room, or no start.
    """
    async with AsyncExitStack() as stack:
        postgres = None
        if address is None:
            # Crashes of processes are tried, not of the machine.
            settings = {"max_connections": plan.connections + CONTROL_CONNECTIONS, "fsync": False}
            postgres = await stack.enter_async_context(EmbeddedPostgres(settings=settings))
            address = dsn.parse(postgres.dsn(), source="--embedded", env={})
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-prove-")))
        address = await _reachable(address, plan.schema)
        control = Control(address, plan.schema)
        stack.callback(control.close)
        async with control.use() as connection:
            await queries.require_room(connection, plan.schema, plan.connections)
            if not keep:
                stack.push_async_callback(_drop, control, plan.schema, tell)
            await migrate(connection, plan.schema)
            version = await queries.server_version(connection)
            offset_s = await _clock_offset_s(connection)
        books = Books()
        rng = random.Random(plan.seed)  # noqa: S311 (a repeatable run is the point)
        forward = None
        if plan.receiver is not None:
            forward = await stack.enter_async_context(forwarding(plan.receiver, secret))
        groups = min(GROUPS_MAX, plan.endpoints)
        receivers = Receivers(books, groups, random.Random(rng.random()), forward)  # noqa: S311
        stack.callback(receivers.close)
        await receivers.open()
        producers = Producers(plan, books, random.Random(rng.random()), control.open)  # noqa: S311
        fleet = Fleet(plan, address, directory)
        stack.push_async_callback(fleet.close)
        set_up = Stage(
            plan,
            postgres,
            address,
            version,
            control,
            books,
            receivers,
            fleet,
            producers,
            offset_s,
            directory,
        )
        async with control.use() as connection:
            await producers.set_up(connection)
            await set_up.add_endpoints(connection, range(plan.endpoints))
        await fleet.start()
        yield set_up


async def _reachable(address: Dsn, schema: str) -> Dsn:
    """The DSN with the one of its addresses that a relay would use.

    Raises:
        DatabaseUnavailable: none of them answers.
    """
    failures: list[str] = []
    for each in address.addresses:
        only = replace(address, addresses=(each,))
        try:
            connection = await connect(only, schema=schema)
        except DatabaseUnavailable as error:
            failures.append(str(error))
            continue
        connection.terminate()
        return only
    raise DatabaseUnavailable("; ".join(failures))


async def _clock_offset_s(connection: Connection[Any]) -> float:
    """The run's clock minus the database's, by the quickest of some answers."""
    best: tuple[float, float] | None = None
    for _ in range(CLOCK_SAMPLES):
        asked_at = time.monotonic()
        there = await queries.clock(connection)
        took = time.monotonic() - asked_at
        if best is None or took < best[0]:
            best = took, asked_at + took / 2 - there
    assert best is not None
    return best[1]


async def _drop(control: Control, schema: str, tell: Callable[[str], None]) -> None:
    try:
        async with control.insist(DROP_WITHIN_S) as connection:
            await queries.drop_schema(connection, schema)
    except (*TROUBLE, OutboxError) as error:
        with suppress(OSError):
            tell(f"the schema {schema} could not be dropped ({error}): drop it by hand")
