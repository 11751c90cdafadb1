"""The demo's stage: a database, three receivers, and a relay in its own process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.endpoint import EndpointSettings
from outbox.core.pattern import parse as parse_pattern
from outbox.core.retry import RetryPolicy
from outbox.core.signature import parse_secret
from outbox.demo.shop import CLERKS
from outbox.embedded import EmbeddedPostgres
from outbox.embedded.launch import command
from outbox.receiver.server import Outcome, Receiver
from outbox.store import dsn, endpoint_changes
from outbox.store.connect import connect
from outbox.store.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from asyncpg import Connection

    from outbox.receiver.message import Message
    from outbox.receiver.server import Handled
    from outbox.store.dsn import Dsn

SCHEMA = "relay"
LEASE_S = 1.0
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
    receiver: Receiver
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


class RelayProcess:
    """`outbox relay` as a process that is killed and started again."""

    def __init__(self, database: str, log_path: Path) -> None:
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("OUTBOX_", "PG"))},
            "OUTBOX_DSN": database,
            "OUTBOX_LEASE_S": str(LEASE_S),
            "OUTBOX_DRAIN_S": "3",
            # The receivers listen on this machine, which is refused by default.
            "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
            "OUTBOX_LOG_FORMAT": "json",
        }
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self.kills = 0

    @property
    def pid(self) -> int | None:
        """The running process."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start it; it ends with this process, whatever happens."""
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command([sys.executable, "-m", "outbox", "relay"], account=None),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def kill(self) -> None:
        """kill -9: no goodbye, no hand-over."""
        await self._end(signal.SIGKILL)
        self.kills += 1

    async def stop(self) -> None:
        """SIGTERM: drain and stop."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(number)
        await process.wait()

    def last_words(self) -> str:
        """The end of its log, for when it went wrong."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


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
        relay = RelayProcess(postgres.dsn(), postgres.log_path.with_name("relay.log"))
        stack.push_async_callback(relay.stop)
        await relay.start()
        yield Stage(postgres.version, address, control, destinations, relay)


async def _destination(
    stack: AsyncExitStack, control: Connection[Any], plan: Plan, seed: int
) -> Destination:
    receiver = Receiver(
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
