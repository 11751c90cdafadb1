"""Which brokers may be connected to beside a proxy, and for a tenant: at every way in."""

from __future__ import annotations

import re
from dataclasses import replace
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.brokers.port import Owner, Stop, StopKind
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers, check_broker_url, find_destination
from outbox.destinations.endpoint_validation import check_reachable
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.plugins import DESTINATIONS, installed
from outbox_devtools.destination_suite import FixedResolver
from tests.cli.test_commands import execute
from tests.support.api import make_token, serving
from tests.support.process import relay_process
from tests.support.relay import add_endpoint, fetchval, publish
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from outbox.destinations.broker import Broker
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PUBLIC = "93.184.216.34"
SECURE = [each for each in installed(DESTINATIONS) if each.endswith(("+tls", "rediss", "valkeys"))]
OWNER = Owner("database", 1)
PROXY = "http://127.0.0.1:1"
BESIDE = r"brokers are not reached through OUTBOX_PROXY; .* open its network"
PORT = r"port 465: .* a tenant"
NAMED, NUMBERED = "rediss://redis.example.com/orders", f"rediss://{PUBLIC}/orders"
LINES = "rediss://redis.example.com:465/orders"
"""A server for mail: an event's key would be a line of what it reads."""


def proxied(*networks: str) -> EgressPolicy:
    return EgressPolicy(networks, proxied=True)


async def stop_of(broker: Broker) -> Stop:
    """Why a lane cannot be opened.  No connection is made: none of these addresses is reached."""
    opened = await broker.open("6814e4af3c30-1-0", OWNER, 0, None)
    await broker.aclose()
    assert isinstance(opened, Stop)
    return opened


def test_all_secure_schemes_are_here() -> None:
    assert len(SECURE) == 5


@pytest.mark.parametrize("scheme", SECURE)
async def test_a_proxy_is_not_bypassed(scheme: str) -> None:
    for host in ("broker.example.com", PUBLIC):
        with pytest.raises(UsageError, match=BESIDE) as error:
            check_broker_url(f"{scheme}://{host}/t", proxied(), ())
        assert "\n" not in str(error.value)
    own = (ip_network(f"{PUBLIC}/32"),)
    check_broker_url(f"{scheme}://{PUBLIC}/t", proxied(f"{PUBLIC}/32"), ())
    check_broker_url(f"{scheme}://{PUBLIC}/t", proxied(), own)
    # What a name resolves to is known at the connection.
    resolver = FixedResolver({"broker.example.com": [PUBLIC]})
    address = BrokerAddress(f"{scheme}://broker.example.com/t", "user:secret")
    stop = await stop_of(Brokers(proxied("10.0.0.0/8"), resolver).connect(address))
    assert stop.kind is StopKind.MISCONFIGURED
    assert "OUTBOX_PROXY" in stop.detail


@pytest.mark.parametrize("scheme", SECURE)
async def test_an_endpoint_of_a_tenant_has_the_ports_of_its_broker(scheme: str) -> None:
    name = f"{scheme}://broker.example.com"
    check_broker_url(f"{name}:465/t", EgressPolicy(), ())
    check_broker_url(f"{name}/t", EgressPolicy(), (), of_tenant=True)
    with pytest.raises(UsageError, match=PORT) as error:
        check_broker_url(f"{name}:465/t", EgressPolicy(), (), of_tenant=True)
    (port,) = {port for _, port in find_destination(name).parse_url(f"{name}/t").servers}
    assert str(port) in str(error.value)
    # Also where a server of the URL names it, as the leader of a stream.
    resolver = FixedResolver({"broker.example.com": [PUBLIC]})
    address = BrokerAddress(f"{name}:465/t", "user:secret", of_tenant=True)
    stop = await stop_of(Brokers(EgressPolicy(["10.0.0.0/8"]), resolver).connect(address))
    assert stop.kind is StopKind.MISCONFIGURED
    assert "port 465" in stop.detail
    check_broker_url(
        f"{scheme}://{PUBLIC}:465/t", EgressPolicy([f"{PUBLIC}/32"]), (), of_tenant=True
    )


def test_a_change_is_checked_with_the_tenant_that_it_sets() -> None:
    current = EndpointSettings(name="a", url=LINES)
    check_reachable(current, EgressPolicy())
    with pytest.raises(UsageError, match=PORT):
        check_reachable(replace(current, tenant="acme"), EgressPolicy(), current)
    # What a rule refuses since can be changed otherwise.
    stored = replace(current, tenant="acme")
    check_reachable(replace(stored, lanes=2), EgressPolicy(), stored)


WAYS = [
    (NAMED, None, PROXY, BESIDE),
    (LINES, "acme", None, PORT),
]


@pytest.mark.parametrize(("url", "tenant", "proxy", "reason"), sampled(WAYS), ids=["proxy", "port"])
def test_no_command_lets_it_in(
    database: Database,
    here: Command,
    tmp_path: Path,
    url: str,
    tenant: str | None,
    proxy: str | None,
    reason: str,
) -> None:
    env = {} if proxy is None else {"OUTBOX_PROXY": proxy}
    of_tenant = () if tenant is None else ("--tenant", tenant)
    file = tmp_path / "endpoints.json"
    file.write_bytes(orjson.dumps({"endpoints": [{"name": "a", "url": url, "tenant": tenant}]}))
    assert here("endpoint", "add", "old", NAMED, *of_tenant).code == 0
    for words in (
        ("endpoint", "add", "new", url, *of_tenant),
        ("endpoint", "update", "old", "--url", url.replace("redis.", "other.")),
        ("apply", "-f", file),
    ):
        refused = here(*words, **env)
        assert refused.code == 2, words
        assert re.search(reason, refused.error), words
    # One that was stored before a rule applied.
    execute(database, f"UPDATE endpoint SET url = '{url}' WHERE name = 'old'")
    tested = here("endpoint", "test", "old", "--json", **env)
    assert (tested.code, tested.json["response"]["failure"]) == (1, "misconfigured")
    assert re.search(reason, tested.json["response"]["detail"])
    assert re.search(f'reject the URL of "old": .*{reason}', here("doctor", **env).out)


@pytest.mark.parametrize(("url", "tenant", "proxy", "reason"), WAYS, ids=["proxy", "port"])
@pytest.mark.full
async def test_no_request_lets_it_in(
    database: Database, url: str, tenant: str | None, proxy: str | None, reason: str
) -> None:
    settings: dict[str, Any] = {"allow_networks": (), "proxy": proxy}
    await add_endpoint(database, "old", url="https://shop.example.com/")
    async with serving(database, **settings) as api:
        everywhere = api.with_token(await make_token(database))
        new = {"name": "new", "url": url, "tenant": tenant}
        responses = [
            await everywhere.post("/v1/endpoints", new),
            await everywhere.request("PUT", "/v1/declaration", {"endpoints": [new]}),
        ]
        if tenant is not None:
            own = api.with_token(await make_token(database, "own", tenant=tenant))
            responses.append(await own.post("/v1/endpoints", {**new, "name": f"{tenant}.new"}))
        for each in responses:
            assert each.status == 422
            assert re.search(reason, each.json["detail"])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
async def test_a_relay_holds_an_endpoint_that_was_stored_before_its_proxy(
    database: Database, tmp_path: Path
) -> None:
    await add_endpoint(database, url=NUMBERED)
    await publish(database, 1)
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_PROXY": PROXY}
    failure = "SELECT last_response ->> 'detail' FROM lane_progress"
    async with relay_process(env, tmp_path / "log"):
        await until(lambda: fetchval(database, failure), what="the failure")
    assert re.search(BESIDE, await fetchval(database, failure))
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
