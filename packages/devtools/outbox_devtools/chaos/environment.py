"""Environment of a chaos run: its own schema, endpoints, receivers and relays."""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.core.messages.signature import parse_secret
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.retry_policy import RetryPolicy
from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.operations.endpoints.changes import plan_addition
from outbox.operations.endpoints.writes import add_endpoints, replace_subscriptions
from outbox.operations.feeds.starts import begin_feed, resolve_start
from outbox.receiver.proxy import open_proxy
from outbox.store.change import make_change
from outbox.store.connection import dsn
from outbox.store.connection.connect import CONNECTION_ERRORS, connect
from outbox.store.connection.migrate import migrate
from outbox.store.connection.secrets import CLEAR
from outbox_devtools.chaos import queries
from outbox_devtools.chaos.control import ControlConnection
from outbox_devtools.chaos.facts import SnapshotStart
from outbox_devtools.chaos.ledger import Ledger
from outbox_devtools.chaos.operators import Operators
from outbox_devtools.chaos.plan import CONTROL_CONNECTIONS
from outbox_devtools.chaos.producers import Producers
from outbox_devtools.chaos.receivers import Receivers
from outbox_devtools.chaos.relays import Relays
from outbox_devtools.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.position import Position
    from outbox.store.change import Change
    from outbox.store.connection.dsn import Dsn
    from outbox_devtools.chaos.plan import ChaosPlan, PlannedEndpoint

ACTOR = "outbox-prove"
GROUPS_MAX = 8
RECEIVER_CONNECT_TIMEOUT_S = 1.0
RECEIVER_TIMEOUT_S = 3.0
FORWARD_TIMEOUT_S = 15.0
# Practically unlimited attempts: a temporary fault must not create dead letters.
RETRY = RetryPolicy(base_s=0.03, factor=2.0, cap_s=2.0, attempts_max=10_000)
DROP_WITHIN_S = 15.0
CLOCK_SAMPLES = 5


@dataclass(slots=True)
class Environment:
    """The parts of a running environment."""

    plan: ChaosPlan
    postgres: EmbeddedPostgres | None
    server_version: str
    control: ControlConnection
    ledger: Ledger
    receivers: Receivers
    relays: Relays
    operators: Operators
    producers: Producers
    clock_offset_s: float
    """Added to a database time to get the run's monotonic time."""
    directory: Path
    endpoint_ids: dict[UUID, int] = field(default_factory=dict)
    """Number of each endpoint."""
    endpoint_settings: dict[int, EndpointSettings] = field(default_factory=dict)
    """Settings with which the endpoints were added."""
    subscriptions: dict[int, frozenset[int]] = field(default_factory=dict)
    """Numbers of the event types that each endpoint gets."""
    snapshots: dict[int, SnapshotStart] = field(default_factory=dict)
    """Endpoints that begin at the position of a snapshot."""

    async def add_subscriber(
        self,
        connection: Connection[Any],
        source: int,
        start: tuple[Position, frozenset[bytes]] | None = None,
    ) -> int:
        """Add an endpoint for the events of another one; returns its number.

        Args:
            start: the position at which it begins, and the events that its snapshot saw; None: it
                begins with new events.
        """
        number = len(self.subscriptions)
        position = None
        if start is not None:
            position, seen = start
            # Before it is added: a lost connection may hide that it was.
            self.snapshots[number] = SnapshotStart(seen, time.monotonic())
        planned = replace(self.plan.endpoint(source), name=f"e{number}")
        await self.add_endpoints(connection, {number: planned}, position)
        return number

    async def add_endpoints(
        self,
        connection: Connection[Any],
        endpoints: Mapping[int, PlannedEndpoint],
        start: Position | None = None,
    ) -> None:
        """Add endpoints."""
        settings = {number: self._settings(number, each) for number, each in endpoints.items()}
        self.endpoint_settings.update(settings)
        # Registered before they can get a delivery.
        self.subscriptions.update({number: each.types for number, each in endpoints.items()})

        async def plan(change: Change) -> None:
            added = {n: await plan_addition(change, its, CLEAR) for n, its in settings.items()}
            add_endpoints(change, [new.row for new in added.values()])
            if start is None:
                replace_subscriptions(change, [new.id for new in added.values()])
            else:
                begins = await resolve_start(change.db, start)
                for new in added.values():
                    begin_feed(change, new.id, begins)
            # Before it is written, after which deliveries may arrive at once.
            for number, new in added.items():
                self.endpoint_ids[new.id] = number
                assert new.secret is not None  # None was given.
                self.receivers.endpoint(number).secret = parse_secret(new.secret)

        await make_change(connection, self.plan.schema, ACTOR, plan)

    def _settings(self, number: int, planned: PlannedEndpoint) -> EndpointSettings:
        timeout_s = RECEIVER_TIMEOUT_S if self.plan.receiver is None else FORWARD_TIMEOUT_S
        return EndpointSettings(
            name=planned.name,
            url=self.receivers.add(number, planned),
            types=(planned.pattern,),
            lanes=planned.lanes,
            retry=RETRY,
            connect_timeout_s=RECEIVER_CONNECT_TIMEOUT_S,
            timeout_s=timeout_s,
        )


@asynccontextmanager
async def open_environment(
    plan: ChaosPlan,
    address: Dsn | None,
    secret: bytes | None,
    *,
    keep: bool,
    log: Callable[[str], None],
) -> AsyncIterator[Environment]:
    """Set up the environment, and remove it at the end in any case.

    Args:
        plan: the plan of the run.
        address: the database; None: an embedded one.
        secret: signs deliveries that are forwarded to the plan's receiver.
        keep: do not drop the schema.
        log: called with a line of progress.

    Raises:
        CannotRun: no database, no privilege, too few connections, or no start.
    """
    async with AsyncExitStack() as stack:
        postgres = None
        if address is None:
            # fsync off: chaos runs crash processes, not the machine.
            settings = {"max_connections": plan.connections + CONTROL_CONNECTIONS, "fsync": False}
            postgres = await stack.enter_async_context(
                EmbeddedPostgres(plan.major, settings=settings)
            )
            address = dsn.parse(postgres.dsn(), source="--embedded", env={})
            # Removed with the server's directory, even after a SIGKILL of this process.
            directory = postgres.log_path.with_name("relays")
            directory.mkdir()
        else:
            temporary = tempfile.TemporaryDirectory(prefix="outbox-prove-")
            directory = Path(stack.enter_context(temporary))
        address = await _reachable(address, plan.schema)
        control = ControlConnection(address, plan.schema)
        stack.callback(control.close)
        async with control.use() as connection:
            await queries.require_capacity(connection, plan.schema, plan.connections)
            if postgres is None and not keep:
                stack.push_async_callback(_drop, control, plan.schema, log)
            await migrate(connection, plan.schema)
            version = await queries.server_version(connection)
            offset_s = await _clock_offset_s(connection)
        ledger = Ledger()
        rng = random.Random(plan.seed)  # noqa: S311 (a repeatable run is the point)
        forward = None
        if plan.receiver is not None:
            forward = await stack.enter_async_context(open_proxy(plan.receiver, secret))
        groups = min(GROUPS_MAX, plan.endpoints)
        receivers = Receivers(ledger, groups, random.Random(rng.random()), forward)  # noqa: S311
        stack.callback(receivers.close)
        await receivers.open()
        producers = Producers(plan, ledger, random.Random(rng.random()), control.open)  # noqa: S311
        relays = Relays(plan, address, directory)
        stack.push_async_callback(relays.close)
        operators = Operators(address, plan.schema, directory)
        stack.push_async_callback(operators.close)
        environment = Environment(
            plan,
            postgres,
            version,
            control,
            ledger,
            receivers,
            relays,
            operators,
            producers,
            offset_s,
            directory,
        )
        async with control.use() as connection:
            await producers.set_up(connection)
            await environment.add_endpoints(
                connection, {number: plan.endpoint(number) for number in range(plan.endpoints)}
            )
        await relays.start()
        yield environment


async def _reachable(address: Dsn, schema: str) -> Dsn:
    """Reduce a DSN to the address that a relay would use.

    Raises:
        DatabaseUnavailable: no address can be reached.
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
    """Measure the run's clock minus the database's, from the fastest of some samples."""
    best: tuple[float, float] | None = None
    for _ in range(CLOCK_SAMPLES):
        requested_at = time.monotonic()
        database_s = await queries.clock(connection)
        round_trip_s = time.monotonic() - requested_at
        if best is None or round_trip_s < best[0]:
            best = round_trip_s, requested_at + round_trip_s / 2 - database_s
    assert best is not None
    return best[1]


async def _drop(control: ControlConnection, schema: str, log: Callable[[str], None]) -> None:
    try:
        async with control.use_within(DROP_WITHIN_S) as connection:
            await queries.drop_schema(connection, schema)
    except (*CONNECTION_ERRORS, OutboxError) as error:
        with suppress(OSError):
            log(f"the schema {schema} could not be dropped ({error}): drop it by hand")
