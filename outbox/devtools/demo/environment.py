"""Environment of the demo: a database, three receivers, and a relay in its own process."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.signature import parse_secret
from outbox.core.model.endpoint import EndpointSettings
from outbox.core.model.pattern import parse as parse_pattern
from outbox.core.model.retry_policy import RetryPolicy
from outbox.devtools.demo.application import PRODUCERS
from outbox.devtools.development_receiver import DevelopmentReceiver, HandledOutcome
from outbox.devtools.embedded import EmbeddedPostgres
from outbox.devtools.relay_process import RelayProcess
from outbox.operations import endpoint_changes
from outbox.store.connection import dsn
from outbox.store.connection.connect import connect
from outbox.store.connection.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.devtools.development_receiver import HandledRequest
    from outbox.receiver.message import Message
    from outbox.store.connection.dsn import Dsn

SCHEMA = "relay"
RELAY_SETTINGS = {"OUTBOX_LEASE_S": "1", "OUTBOX_DRAIN_S": "3"}
RETRY = RetryPolicy(base_s=0.03, factor=2.0, cap_s=1.0, attempts_max=12)


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """Configuration of one endpoint of the demo."""

    name: str
    types: tuple[str, ...]
    lanes: int
    fail_share: float
    description: str


PLANS = (
    EndpointPlan("billing", ("order.*",), 4, 0.10, "fails 10% of requests"),
    EndpointPlan(
        "mailer", ("order.paid",), 2, 0.20, "fails 20% of requests, refuses bad addresses"
    ),
    EndpointPlan("archive", ("**",), 4, 0.03, "accepts everything, fails 3% of requests"),
)


@dataclass(slots=True)
class ProcessedDelivery:
    """A delivery processed by a receiver."""

    event_id: str
    lane: str
    sequence: int
    customer: int
    version: int


@dataclass(slots=True)
class Destination:
    """An endpoint, its receiver, and the processed deliveries."""

    plan: EndpointPlan
    receiver: DevelopmentReceiver
    processed: list[ProcessedDelivery] = field(default_factory=list)
    per_lane: dict[str, int] = field(default_factory=dict)

    def subscribes_to(self, event_type: str) -> bool:
        """Whether the endpoint subscribes to this type."""
        return any(parse_pattern(p).fullmatch(event_type) for p in self.plan.types)

    def record_processed(self, handled: HandledRequest) -> None:
        """Record a delivery that was processed for the first time."""
        message = handled.message
        if handled.outcome is not HandledOutcome.ACCEPTED or message is None:
            return
        data: Any = message.data
        self.processed.append(
            ProcessedDelivery(
                message.event_id,
                message.lane,
                message.sequence,
                data["customer"],
                data["version"],
            )
        )
        self.per_lane[message.lane] = self.per_lane.get(message.lane, 0) + 1


@dataclass(slots=True)
class DemoEnvironment:
    """The parts of a running demo."""

    postgres_version: str
    dsn: Dsn
    control: Connection[Any]
    destinations: list[Destination]
    relay: RelayProcess

    async def connect(self) -> Connection[Any]:
        """Open a connection for the application."""
        return await connect(self.dsn, schema=SCHEMA, application_name="shop")


@asynccontextmanager
async def open_environment(seed: int, major: int | None) -> AsyncIterator[DemoEnvironment]:
    """Set up the environment, and remove it at the end in any case.

    Args:
        seed: of the receivers' faults.
        major: major version of PostgreSQL; None: the newest.

    Raises:
        CannotRun: the PostgreSQL binaries are missing, or the server does not start.
    """
    async with AsyncExitStack() as stack:
        settings = {"max_connections": PRODUCERS + 30}
        postgres = await stack.enter_async_context(EmbeddedPostgres(major, settings=settings))
        address = dsn.parse(postgres.dsn(), source="the demo", env={})
        control = await connect(address, schema=SCHEMA, application_name="outbox-demo")
        stack.callback(control.terminate)
        await migrate(control, SCHEMA)
        destinations = [
            await _destination(stack, control, plan, seed + n) for n, plan in enumerate(PLANS)
        ]
        log_path = postgres.log_path.with_name("relay.log")
        relay = RelayProcess(postgres.dsn(), log_path, RELAY_SETTINGS)
        stack.push_async_callback(relay.stop)
        await relay.start()
        yield DemoEnvironment(postgres.version, address, control, destinations, relay)


async def _destination(
    stack: AsyncExitStack, control: Connection[Any], plan: EndpointPlan, seed: int
) -> Destination:
    receiver = DevelopmentReceiver(
        fail_rate=plan.fail_share,
        rng=random.Random(seed),  # noqa: S311 (a repeatable run is the point)
        refuse=_bad_address if plan.name == "mailer" else None,
        from_start=True,
    )
    destination = Destination(plan, receiver)
    receiver.on_request = destination.record_processed
    url = await stack.enter_async_context(receiver.serve())
    endpoint = await endpoint_changes.add_endpoint(
        control,
        SCHEMA,
        EndpointSettings(
            name=plan.name,
            url=url,
            types=plan.types,
            lanes=plan.lanes,
            retry=RETRY,
        ),
        actor="demo",
    )
    receiver.secrets = (parse_secret(endpoint.secret),)
    return destination


def _bad_address(message: Message) -> str | None:
    data: Any = message.data
    return "no such address" if data["address"] == "nowhere" else None
