"""Which broker a URL names, what is checked before it is used, and a missing client library."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from outbox.core.brokers.port import Owner, Stop, StopKind
from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers, UnusableBroker, check_broker_url, is_same_stream
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.plugins import DESTINATIONS, installed
from outbox_brokers import plugins
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SCHEMES = list(installed(DESTINATIONS))
OWNER = Owner("database", 1)
CLOSED, LOOPBACK = EgressPolicy(), EgressPolicy(["127.0.0.0/8"])

CLIENTS = {"redis": "redis", "nats": "nats", "rabbitmq": "rstream", "kafka": "confluent_kafka"}
"""Module of the client library by the extra that installs it."""


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    made = Brokers(LOOPBACK)
    yield made
    await made.aclose()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("scheme", sampled(SCHEMES, lambda scheme: "+" not in scheme))
async def test_every_scheme_has_a_driver_that_is_away_without_a_server(
    brokers: Brokers, scheme: str
) -> None:
    address = BrokerAddress(
        f"{scheme}://127.0.0.1:1/events", "user:secret", connect_timeout_s=1.0, timeout_s=1.0
    )
    broker = brokers.connect(address)
    try:
        opened = await broker.open("6814e4af3c30-1-0", OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.UNAVAILABLE, opened
        assert "secret" not in opened.detail
        findings = await broker.check(["6814e4af3c30-1-0"])
        assert [each.is_error for each in findings] == [True]
    finally:
        await broker.aclose()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://example.com/s", "would not be encrypted"),
        ("rediss://127.0.0.1/s", "127.0.0.1 is loopback"),
        ("nats+tls://169.254.169.254/s", "link-local"),
        ("kafka://10.0.0.1/t", "10.0.0.1 is a private network"),
        ("rabbitmq-stream+tls://localhost/s", "localhost is loopback"),
        ("redis://user:secret@127.0.0.1/s", "must not contain a user"),
    ],
)
def test_the_egress_rules_are_those_of_all_deliveries(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        check_broker_url(url, CLOSED, ())
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["rediss://example.com:6380/s", "nats+tls://example.com/s", "kafka+tls://example.com/t"]
)
def test_a_public_broker_with_tls_may_have_any_port(url: str) -> None:
    check_broker_url(url, CLOSED, ())


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_missing_client_library_is_named_with_its_extra(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scheme = next(each for each in SCHEMES if each.startswith(name))
    monkeypatch.setitem(sys.modules, CLIENTS[name], None)  # type: ignore[arg-type]
    broker = brokers.connect(BrokerAddress(f"{scheme}://127.0.0.1:1/s"))
    opened = await broker.open("6814e4af3c30-1-0", OWNER, 0, None)
    assert isinstance(opened, Stop)
    assert opened.kind is StopKind.MISCONFIGURED
    assert f"pip install 'outbox-brokers[{name}]==" in opened.detail
    assert isinstance(broker, UnusableBroker)
    assert broker.lack == opened.detail, "readiness would not say so"
    (finding,) = await broker.check([])
    assert finding.what == opened.detail


async def test_a_folder_with_the_name_of_a_client_library_is_none(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", ModuleType("redis"))
    broker = brokers.connect(BrokerAddress("redis://127.0.0.1:1/s"))
    opened = await broker.open("6814e4af3c30-1-0", OWNER, 0, None)
    assert isinstance(opened, Stop)
    assert "pip install 'outbox-brokers[redis]==" in opened.detail


async def test_unusable_settings_are_reported_when_the_lane_is_opened(brokers: Brokers) -> None:
    for address in (
        BrokerAddress("redis://127.0.0.1/a{b"),
        BrokerAddress("redis://127.0.0.1/s", problem="headers: no"),
        BrokerAddress("kafka://127.0.0.1/t?exact=1"),
    ):
        opened = await brokers.connect(address).open("lane", OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.MISCONFIGURED


async def test_an_unexpected_error_ends_the_call_and_names_its_place(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a defect of a driver, and its text may be anything that a server sent."""
    redis = pytest.importorskip("outbox_brokers.redis.broker")

    async def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(redis.RedisBroker, "_run", fail)
    broker = brokers.connect(BrokerAddress("redis://127.0.0.1:1/s"))
    opened = await broker.open("lane", OWNER, 0, None)
    appended = await broker.append("lane", OWNER, 0, [])
    await broker.aclose()
    for stop in (opened, appended.stop):
        assert isinstance(stop, Stop)
        assert stop.kind is StopKind.UNKNOWN
        assert "KeyError at outbox_brokers.redis.broker:" in stop.detail
        assert "secret" not in stop.detail


@pytest.mark.parametrize(
    ("url", "other", "is_same"),
    [
        ("redis://a:1/s", "valkeys://b/s", True),
        ("redis://a/s", "redis://a/s?db=0", True),
        ("redis://a/s", "redis://a/t", False),
        ("redis://a/s", "nats://a/s", False),
        ("redis://a/s?db=1", "redis://a/s", False),
        ("nats://a/s?stream=A", "nats+tls://b/s?stream=A", True),
        ("nats://a/s?stream=A", "nats://a/s?stream=B", False),
        ("rabbitmq-stream://a/s?vhost=v", "rabbitmq-stream://a/s", False),
        ("rabbitmq-stream://a/s?vhost=v&create=1", "rabbitmq-stream+tls://a/s?vhost=v", True),
        ("kafka://a/t?sasl=plain", "kafka+tls://b/t", True),
        ("kafka://a/t", "https://a/t", False),
    ],
)
def test_other_servers_may_have_the_same_streams(url: str, other: str, *, is_same: bool) -> None:
    assert is_same_stream(url, other) is is_same
    assert is_same_stream(other, url) is is_same


def test_a_stored_url_may_have_an_option_that_is_gone() -> None:
    assert is_same_stream("kafka://a/t?exact=1", "kafka://a/t")
    assert not is_same_stream("kafka://a/t?exact=1", "kafka://a/u")
    with pytest.raises(UsageError, match="unknown option 'exact'"):
        is_same_stream("kafka://a/t", "kafka://a/t?exact=1")


def test_credentials_that_a_broker_does_not_take_are_refused() -> None:
    creds = "-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n"
    plugins.NATS.check_credentials(creds)
    for each in (plugins.REDIS, plugins.RABBITMQ, plugins.KAFKA):
        each.check_credentials("user:secret")
        with pytest.raises(UsageError, match=r"^credentials: ") as refused:
            each.check_credentials(creds)
        assert "JWT" not in str(refused.value)
