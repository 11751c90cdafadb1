"""The test bench: a PostgreSQL, a receiver, and processes that end with this one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from benchmarks.given import GivenServer, given
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.retry_policy import STANDARD
from outbox.destinations.broker_address import credentials_header
from outbox.errors import CannotRun
from outbox.operations.endpoints import changes as endpoint_changes
from outbox_devtools.embedded.launch import command
from tests.support.postgres import SCHEMA, Database, Server
from tests.support.process import RelayProcess, environment, relay_process
from tests.support.prototypes import memory
from tests.support.relay import SHARED_OUT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.model.message_format import FormatName
    from outbox.core.model.retry_policy import RetryPolicy
    from outbox_devtools.embedded import Setting

# All settings for durable commits are on. In memory they cost little, so that other costs are more
# visible.
POSTGRES_SETTINGS: Mapping[str, Setting] = {
    "fsync": True,
    "full_page_writes": True,
    "synchronous_commit": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
}
OUTPUT_BYTES_MAX = 1 << 26
TIMEOUT_S = 300.0
POLL_S = 0.02


class Child:
    """A process that exchanges JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name

    @classmethod
    async def start(cls, name: str, argv: Sequence[str], env: dict[str, str] | None = None) -> Self:
        """Start a program."""
        process = await asyncio.create_subprocess_exec(
            *command(argv, account=None),
            env=environment(env),
            cwd=Path(__file__).parents[1],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=OUTPUT_BYTES_MAX,
        )
        return cls(process, name)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_command(self, **what: Any) -> None:
        """Send a JSON line."""
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(what) + b"\n")

    async def response(self) -> Any:
        """Return the next line of its output.

        Raises:
            CannotRun: It ended, or printed nothing.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise CannotRun(f"the benchmark's {self._name} printed nothing") from None
        if not line:
            raise CannotRun(f"the benchmark's {self._name} ended; see its output above")
        return orjson.loads(line)

    async def ended(self) -> int:
        """Wait for its end and return its exit code."""
        return await self._process.wait()

    async def end(self) -> None:
        """Terminate it if it does not end by itself."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


@asynccontextmanager
async def child(
    module: str, *words: object, env: dict[str, str] | None = None
) -> AsyncIterator[Child]:
    """Run `python -m benchmarks.<module>` for a block."""
    argv = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    async with program(module, argv, env=env) as process:
        yield process


@asynccontextmanager
async def program(
    name: str, argv: Sequence[str], *, env: dict[str, str] | None = None
) -> AsyncIterator[Child]:
    """Run a process for a block."""
    process = await Child.start(name, argv, env=env)
    try:
        yield process
    finally:
        await process.end()


@dataclass(slots=True)
class Stage:
    """What the measurements share; the server's data is in memory if there is enough."""

    server: Server
    receiver: Child
    urls: dict[str, str]
    certificate: Path | None
    directory: Path
    say: Callable[[str], None]
    deliveries: int | None = None
    """The number of deliveries of the section "million", if given."""
    files: dict[str, str] = field(default_factory=dict)
    """Pictures and tables of individual sections, by file name."""
    _relays: int = field(default=0)

    def expect(
        self,
        requests: int,
        *,
        delay_s: float = 0.0,
        keep: bool = False,
        every: int = 0,
        distinct: bool = False,
    ) -> None:
        """Set the number of requests that the receiver expects, and how it responds."""
        self.receiver.send_command(
            expect=requests, delay_s=delay_s, keep=keep, every=every, distinct=distinct
        )

    def trusting(self) -> dict[str, str]:
        """Return the environment in which the test certificate is trusted."""
        return {} if self.certificate is None else {"SSL_CERT_FILE": str(self.certificate)}

    def write(self, name: str, text: str) -> Path:
        """Write a temporary file."""
        path = self.directory / name
        path.write_text(text, "utf-8")
        return path

    @asynccontextmanager
    async def relay(
        self, database: Database, *, owns: bool = True, **env: str
    ) -> AsyncIterator[RelayProcess]:
        """Run a relay; wait until it has acquired all endpoints, or only until it starts."""
        self._relays += 1
        log_path = self.directory / f"relay-{self._relays}.log"
        given = {"OUTBOX_DSN": database.dsn, "OUTBOX_LEASE_S": "5", **self.trusting(), **env}
        async with relay_process(given, log_path, is_forked=False) as relay:
            if owns:
                await self.until_owned(database, relay)
            yield relay

    @property
    def server_description(self) -> str:
        """Describe the PostgreSQL server for the table."""
        if isinstance(self.server, GivenServer):
            return f"{self.server.version}, not embedded"
        where = "in memory" if memory() else "on disk"
        return f"{self.server.version}, fsync and synchronous_commit on, data {where}"

    @asynccontextmanager
    async def durable(self) -> AsyncIterator[Server]:
        """Run a server whose commits wait for a real disk: a second one, or the given one."""
        if isinstance(self.server, GivenServer):
            yield self.server
            return
        server = Server(None, POSTGRES_SETTINGS, on_disk=True)
        async with server.embedded:
            yield server

    async def until_owned(self, database: Database, relay: RelayProcess) -> None:
        """Wait until the relay owns every endpoint.

        Raises:
            CannotRun: It did not happen in time.
        """
        async with search(database) as connection:
            await until(
                connection,
                "SELECT EXISTS (SELECT FROM replica)"
                " AND NOT EXISTS (SELECT FROM ownership WHERE replica_id IS NULL)",
                relay,
            )

    async def until_shared_out(
        self, connection: Connection[Any], relays: Sequence[RelayProcess]
    ) -> None:
        """Wait until this many relays run, each with its share of the endpoints.

        Raises:
            CannotRun: It did not happen in time.
        """
        await until_true(lambda: connection.fetchval(SHARED_OUT, len(relays)), relays)


@asynccontextmanager
async def search(database: Database) -> AsyncIterator[Connection[Any]]:
    """Open a connection whose search path includes our schema."""
    async with database.connection(server_settings={"search_path": SCHEMA}) as connection:
        yield connection


async def until(
    connection: Connection[Any],
    sql: str,
    relay: RelayProcess,
    poll_s: float = POLL_S,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Poll until the condition is true.

    Raises:
        CannotRun: The relay ended, or it takes far too long.
    """
    await until_true(lambda: connection.fetchval(sql), [relay], poll_s, timeout_s)


async def until_true(
    condition: Callable[[], Awaitable[Any]],
    relays: Sequence[RelayProcess],
    poll_s: float = POLL_S,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Poll until the condition is true.

    Raises:
        CannotRun: One of the relays ended, or it takes far too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():
                for relay in relays:
                    if relay.process is None or relay.process.returncode is not None:
                        raise CannotRun(f"the relay ended: {relay.log()[-1:]}")
                await asyncio.sleep(poll_s)
    except TimeoutError:
        last_lines = [relay.log()[-1:] for relay in relays]
        raise CannotRun(f"the relay did not reach the state in time: {last_lines}") from None


async def add_endpoint(
    connection: Connection[Any],
    url: str,
    *,
    lanes: int = 1,
    name: str = "receiver",
    types: tuple[str, ...] = (),
    batch_max: int | None = None,
    format_name: FormatName = "envelope",
    retry: RetryPolicy = STANDARD,
    credentials: str | None = None,
) -> None:
    """Add an endpoint; without types it gets all events."""
    headers = {} if credentials is None else {"Authorization": credentials_header(credentials)}
    settings = EndpointSettings(
        headers=headers,
        name=name,
        url=url,
        lanes=lanes,
        types=types,
        batch_max=batch_max,
        format=format_name,
        retry=retry,
    )
    await endpoint_changes.add_endpoint(connection, SCHEMA, settings, actor="bench")


async def add_tenant_endpoint(
    connection: Connection[Any], tenant: str, name: str, url: str
) -> None:
    """Add an endpoint of a tenant, which gets all of its events."""
    settings = EndpointSettings(name=name, url=url, lanes=1, tenant=tenant)
    await endpoint_changes.add_endpoint(connection, SCHEMA, settings, actor="bench")


async def add_endpoints(
    connection: Connection[Any],
    url: str,
    number: int,
    *,
    lanes: int = 1,
    batch_max: int | None = None,
    format_name: FormatName = "envelope",
) -> None:
    """Add endpoints, each with an event type of its own, `order.n<its number>`."""
    for n in range(number):
        await add_endpoint(
            connection,
            url,
            lanes=lanes,
            name=f"n{n}",
            types=(f"order.n{n}",),
            batch_max=batch_max,
            format_name=format_name,
        )


@asynccontextmanager
async def stage(
    say: Callable[[str], None], *, dsn: str | None = None, deliveries: int | None = None
) -> AsyncIterator[Stage]:
    """Set everything up, and tear it down afterwards.

    Args:
        dsn: An empty database of the server to use; None: an embedded server.
        deliveries: See `Stage`.

    Raises:
        CannotRun: PostgreSQL's programs are missing, it does not start, or the given server cannot
            be used.
        UsageError: `dsn` is invalid.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-bench-")))
        server: Server
        if dsn is None:
            server = Server(None, POSTGRES_SETTINGS)
            await stack.enter_async_context(server.embedded)
        else:
            server = await given(dsn)
            stack.push_async_callback(server.leave)
        certificate = await asyncio.to_thread(_certificate, directory)
        words = ["--certificate", certificate] if certificate else []
        receiver = await stack.enter_async_context(child("receiver", *words))
        ports = await receiver.response()
        urls = {scheme: f"{scheme}://127.0.0.1:{port}/" for scheme, port in ports.items() if port}
        yield Stage(server, receiver, urls, certificate, directory, say, deliveries)


def _certificate(directory: Path) -> Path | None:
    """Return key and certificate for 127.0.0.1; None without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        return None
    key, certificate, both = (directory / name for name in ("key", "certificate", "both.pem"))
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
