"""Every feature works under the hardening of docs/howto/deploy.md."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import pytest
import yaml

from outbox.core.model.encryption_keys import format_key
from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.destinations.authority import Authority
from tests.destinations.servers import OK, respond_with, serving
from tests.support.brokers.nats import nats_server
from tests.support.brokers.valkey import valkey
from tests.support.checkout import ROOT
from tests.support.collector import collecting
from tests.support.hardening import Sandbox, Trace, allowed_calls, can_harden, settings
from tests.support.ports import free_port
from tests.support.postgres import API_ROLE
from tests.support.process import outbox
from tests.support.relay import all_ended, fetchval, publish
from tests.support.roles import role
from tests.support.tcp import forward_to, listening
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.mounts,
    pytest.mark.skipif(not can_harden(), reason="no mount namespace can be made here"),
]

MEMORY_MAX_BYTES = 512 << 20
"""The limit of the documents."""
RELAY, API, MIGRATE = (
    ROOT / f"deploy/outbox-{name}.service" for name in ("relay", "api", "migrate")
)
needs_tools = pytest.mark.skipif(
    shutil.which("strace") is None or shutil.which("systemd-analyze") is None,
    reason="strace or systemd-analyze is not installed",
)
TRIED = "AF_NETLINK"
"""Address family by which glibc's getaddrinfo asks for the machine's own addresses.  A unit refuses
it, and the resolution of names goes on without."""
DEAD = "SELECT count(*) FROM relay.dead_letter"


class Installation(NamedTuple):
    """A database that the sandbox reaches by TCP, and what runs in it."""

    sandbox: Sandbox
    owner: dict[str, str]
    """The environment of commands."""
    relay: dict[str, str]
    api: dict[str, str]


@asynccontextmanager
async def installation(database: Database, directory: Path) -> AsyncIterator[Installation]:
    """Roles, a key and a sandbox for the length of the block."""
    socket = database.server.embedded.socket_dir / ".s.PGSQL.5432"
    common = {
        "OUTBOX_KEY": format_key(bytes(range(32))),
        "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
        "OUTBOX_LEASE_S": "30",
    }
    async with role(database, "relay") as name, listening(forward_to(str(socket))) as port:
        at = f"127.0.0.1:{port}/{database.name}?sslmode=disable"
        yield Installation(
            Sandbox(directory),
            {**common, "OUTBOX_DSN": f"postgresql://postgres@{at}"},
            {**common, "OUTBOX_DSN": f"postgresql://{name}@{at}"},
            {**common, "OUTBOX_API_DSN": f"postgresql://{API_ROLE}@{at}"},
        )


def _check_filters(trace: Path, unit: Path) -> None:
    """Whether a unit allows what strace has recorded."""
    made = Trace(trace)
    assert len(made.names()) > 30, "strace recorded nothing"
    assert made.names() - allowed_calls(unit) == set()
    (families,) = settings(unit, "RestrictAddressFamilies")
    assert made.families() - {*families.split(), TRIED} == set()
    assert settings(unit, "MemoryDenyWriteExecute") == ["yes"]
    assert made.executable() == []


async def _set_up(installed: Installation, authority: Authority, **endpoints: Any) -> None:
    """Apply endpoints, each for the type with its name; "mutual" has a client certificate."""
    declared = [{"name": name, "types": [name], **each} for name, each in endpoints.items()]
    text = yaml.safe_dump({"endpoints": declared})
    await _run(installed, "apply", "-f", "-", stdin=text)
    certificate = "".join(authority.identity())
    await _run(installed, "endpoint", "certificate", "mutual", "-", stdin=certificate)


async def _run(installed: Installation, *words: str, stdin: str = "") -> str:
    """Run a command outside of the sandbox, which is faster."""
    ended = await outbox(*words, env=installed.owner, stdin=stdin)
    assert ended.code == 0, ended.stderr
    return ended.stdout


async def _tokens(installed: Installation) -> tuple[str, str]:
    """A token of the API with all scopes, and one to fetch what "plain" missed."""
    scopes = [word for each in ("read", "publish", "operate") for word in ("--scope", each)]
    token = json.loads(await _run(installed, "token", "add", "me", *scopes, "--json"))
    fetch = json.loads(await _run(installed, "endpoint", "fetch-token", "plain", "--json"))
    return token["secret"], fetch["token"]


def _listeners(ports: dict[str, int]) -> dict[str, str]:
    return {f"OUTBOX_{name.upper()}": f"127.0.0.1:{port}" for name, port in ports.items()}


async def test_mutual_tls_works_without_a_file_system_and_without_capabilities(
    database: Database, tmp_path: Path
) -> None:
    """The client certificate is in the database, encrypted."""
    authority = Authority()
    tls = authority.server("localhost", clients=authority)
    async with (
        installation(database, tmp_path) as installed,
        serving(respond_with(OK), tls) as receiver,
    ):
        mutual = {"url": f"https://localhost:{receiver.port}/", "ca": authority.pem}
        await _set_up(installed, authority, mutual=mutual)
        await publish(database, {"n": 1}, type="mutual")
        async with installed.sandbox.serving("relay", env=installed.relay):
            await all_ended(database)
    assert len(receiver.received) == 1
    assert await fetchval(database, DEAD) == 0


@pytest.mark.full
@needs_tools
async def test_the_unit_of_the_relay_allows_every_feature(
    database: Database, tmp_path: Path
) -> None:
    from tests.support.brokers.kafka import MockCluster

    features = ("plain", "batches", "filtered", "mutual", "redis", "nats", "kafka")
    authority, receiver, trace = Authority(), DevelopmentReceiver(()), tmp_path / "trace"
    kafka = MockCluster()
    kafka.create_topic("topic", 4)
    async with AsyncExitStack() as stack:
        stack.callback(kafka.close)
        enter = stack.enter_async_context
        installed = await enter(installation(database, tmp_path))
        tls = authority.server("localhost", clients=authority)
        mutual = await enter(serving(respond_with(OK), tls))
        url = await enter(receiver.serve())
        redis = await enter(valkey(tmp_path / "valkey"))
        nats = await enter(nats_server(tmp_path / "nats"))
        await nats.create_stream()
        collector = await enter(collecting())
        ports = {name: free_port() for name in ("admin", "receivers", "health")}

        await _set_up(
            installed,
            authority,
            plain={"url": url.replace("127.0.0.1", "localhost"), "headers": {"X-Secret": "1"}},
            batches={"url": url, "batch_max": 10},
            filtered={"url": url, "filter": "@.n > 3"},
            mutual={"url": f"https://localhost:{mutual.port}/", "ca": authority.pem},
            redis={"url": redis.url()},
            nats={"url": nats.url},
            kafka={"url": f"kafka://{kafka.server}/topic"},
        )
        secrets = await _tokens(installed)
        env = installed.relay | installed.api | _listeners(ports)
        env |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        }
        relay = await enter(installed.sandbox.serving("relay", env=env, trace=trace))
        for name in features:
            await publish(database, *({"n": n} for n in range(5)), type=name)
        await _use_the_api(ports, *secrets)
        await all_ended(database)
        await until(lambda: collector.spans and collector.metrics, LIVE_S, "traces and metrics")
        peak = relay.peak_bytes()
        print(f"peak of relay and API: {peak / 2**20:.0f} MiB")
        assert peak < MEMORY_MAX_BYTES
    assert await fetchval(database, DEAD) == 0
    _check_filters(trace, RELAY)
    assert len(mutual.received) == 5 + 1, "events, and the API's test"
    assert receiver.totals().accepted == 5 + 1 + 5 + 1, "events, and that of the API"


async def _use_the_api(ports: dict[str, int], token: str, fetch_token: str) -> None:
    """Load the page, read and publish by the API, and fetch as a receiver."""
    admin, receivers = (f"http://127.0.0.1:{ports[name]}" for name in ("admin", "receivers"))
    async with aiohttp.ClientSession() as session:

        async def get(url: str, secret: str = "") -> str | None:
            try:
                async with session.get(url, headers={"Authorization": f"Bearer {secret}"}) as got:
                    return await got.text() if got.status == 200 else None
            except aiohttp.ClientConnectionError:
                return None

        page = str(await until(lambda: get(f"{admin}/"), LIVE_S, "the page"))
        for path in re.findall(r'(?:src|href)="(/[^"]+)"', page):
            assert await get(f"{admin}{path}"), path
        for path in ("/v1/status", "/v1/endpoints", "/v1/events", "/v1/live"):
            assert await until(lambda path=path: get(f"{admin}{path}", token), LIVE_S, path)
        body = {"type": "plain", "payload": {"n": 5}}
        headers = {"Authorization": f"Bearer {token}"}
        async with session.post(f"{admin}/v1/events", json=body, headers=headers) as published:
            assert published.status == 201, await published.text()
        async with session.post(f"{admin}/v1/endpoints/mutual/test", headers=headers) as tested:
            assert tested.status == 200, await tested.text()
        assert await until(lambda: get(f"{receivers}/v1/lanes", fetch_token), LIVE_S, "lanes")
        assert await get(f"http://127.0.0.1:{ports['health']}/metrics")


@pytest.mark.full
@needs_tools
async def test_the_unit_of_the_api_allows_every_feature(database: Database, tmp_path: Path) -> None:
    trace, authority = tmp_path / "trace", Authority()
    tls = authority.server("localhost", clients=authority)
    async with (
        installation(database, tmp_path) as installed,
        serving(respond_with(OK), tls) as receiver,
    ):
        plain = {"url": "http://127.0.0.1:1/"}
        mutual = {"url": f"https://localhost:{receiver.port}/", "ca": authority.pem}
        await _set_up(installed, authority, plain=plain, mutual=mutual)
        secrets = await _tokens(installed)
        ports = {name: free_port() for name in ("admin", "receivers", "health")}
        env = installed.api | _listeners(ports)
        async with installed.sandbox.serving("api", env=env, trace=trace) as api:
            await _use_the_api(ports, *secrets)
            assert api.peak_bytes() < MEMORY_MAX_BYTES
    assert len(receiver.received) == 1
    _check_filters(trace, API)


@pytest.mark.full
@needs_tools
async def test_the_unit_of_the_migration_allows_it(
    empty_database: Database, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    socket = empty_database.server.embedded.socket_dir / ".s.PGSQL.5432"
    async with listening(forward_to(str(socket))) as port:
        dsn = f"postgresql://postgres@127.0.0.1:{port}/{empty_database.name}?sslmode=disable"
        out = await Sandbox(tmp_path).run("migrate", env={"OUTBOX_DSN": dsn}, trace=trace)
    assert "is at version" in out
    _check_filters(trace, MIGRATE)
