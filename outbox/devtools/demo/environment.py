"""The demo's stage: a database, three receivers, and a relay in its own process."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.signature import parse_secret
from outbox.core.model.endpoint import EndpointSettings
from outbox.core.model.pattern import parse as parse_pattern
from outbox.core.model.retry_policy import RetryPolicy
from outbox.devtools.demo.application import CLERKS
from outbox.devtools.development_receiver import DevelopmentReceiver, Outcome
from outbox.devtools.embedded import EmbeddedPostgres
from outbox.devtools.relay_process import RelayProcess
from outbox.operations import endpoint_changes
from outbox.store.connection import dsn
from outbox.store.connection.connect import connect
from outbox.store.connection.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.devtools.development_receiver import Handled
    from outbox.receiver.message import Message
    from outbox.store.connection.dsn import Dsn

SCHEMA = "relay"
RELAY_SETTINGS = {"OUTBOX_LEASE_S": "1", "OUTBOX_DRAIN_S": "3"}
RETRY = RetryPolicy(base_s=0.03, factor=2.0, cap_s=1.0, attempts_max=12)


@dataclass(frozen=True, slots=True)
class Plan:
    """One endpoint of the demo."""

    name: str
    types: tuple[str, ...]
    lanes: int
    fail_share: float
    story: str


PLANS = (
    Plan("billing", ("order.*",), 4, 0.10, "fails one time in ten"),
    Plan("mailer", ("order.paid",), 2, 0.20, "fails one in five, refuses bad addresses"),
    Plan("archive", ("**",), 4, 0.03, "takes everything, seldom fails"),
)


@dataclass(slots=True)
class Delivered:
    """What a receiver processed, as it came."""

    event_id: str
    lane: str
    sequence: int
    customer: int
    version: int


@dataclass(slots=True)
class Destination:
    """An endpoint, its receiver, and the receiver's own books."""

    plan: Plan
    receiver: DevelopmentReceiver
    processed: list[Delivered] = field(default_factory=list)
    per_lane: dict[str, int] = field(default_factory=dict)

    def wants(self, event_type: str) -> bool:
        """Whether the endpoint subscribes to this type."""
        return any(parse_pattern(p).fullmatch(event_type) for p in self.plan.types)

    def note(self, handled: Handled) -> None:
        """Keep what was processed for the first time."""
        message = handled.message
        if handled.outcome is not Outcome.ACCEPTED or message is None:
            return
        data: Any = message.data
        self.processed.append(
            Delivered(
                message.event_id,
                message.lane,
                message.sequence,
                data["customer"],
                data["version"],
            )
        )
        self.per_lane[message.lane] = self.per_lane.get(message.lane, 0) + 1


@dataclass(slots=True)
class Stage:
    """Everything that is set up."""

    postgres_version: str
    dsn: Dsn
    control: Connection[Any]
    destinations: list[Destination]
    relay: RelayProcess

    async def connect(self) -> Connection[Any]:
        """A connection for the application."""
        return await connect(self.dsn, schema=SCHEMA, application_name="shop")


@asynccontextmanager
async def stage(seed: int, major: int | None) -> AsyncIterator[Stage]:
    """Set everything up, and take it down again whatever happens.

    Raises:
        CannotRun: PostgreSQL's programs are missing, or it does not start.
    """
    async with AsyncExitStack() as stack:
        settings = {"max_connections": CLERKS + 30}
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
        yield Stage(postgres.version, address, control, destinations, relay)


async def _destination(
    stack: AsyncExitStack, control: Connection[Any], plan: Plan, seed: int
) -> Destination:
    receiver = DevelopmentReceiver(
        fail_rate=plan.fail_share,
        rng=random.Random(seed),  # noqa: S311 (a repeatable run is the point)
        refuse=_bad_address if plan.name == "mailer" else None,
        from_start=True,
    )
    destination = Destination(plan, receiver)
    receiver.on_request = destination.note
    url = await stack.enter_async_context(receiver.serve())
    endpoint = await endpoint_changes.add(
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
