"""Checks of a Kafka topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("confluent_kafka")

from outbox.core.brokers.broker_url import Server
from outbox.core.brokers.port import StopKind
from outbox.network.dns import CachingResolver
from outbox.network.egress import EgressPolicy
from outbox_brokers.kafka.check import (
    check_configs,
    check_partitions,
    check_topic,
)
from outbox_brokers.kafka.egress import SERVERS_NAMED_MAX, ServerChecks
from outbox_brokers.kafka.reader import Topic
from tests.support.brokers.kafka import REAL, MockCluster, address_of, real_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from outbox.destinations.broker import BrokerFinding

GOOD = {
    "cleanup.policy": "delete",
    "min.insync.replicas": "2",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    cluster.create_topic("events", 4)
    yield cluster
    cluster.close()


@pytest.fixture
async def resolver() -> AsyncIterator[CachingResolver]:
    resolver = CachingResolver()
    yield resolver
    await resolver.aclose()


OK, WARNING, PROBLEM = None, False, True


def worst(findings: list[BrokerFinding]) -> bool | None:
    """Whether a finding is an error; None: there are none."""
    return any(each.is_error for each in findings) if findings else OK


@pytest.mark.parametrize(
    ("topic", "lanes", "severity", "words"),
    [
        (Topic((), 4, 3, 0), 4, OK, ""),
        (Topic((), 4, 3, 0), 5, PROBLEM, "4 partitions for 5 lanes"),
        (Topic((), 0, 0, 0), 4, PROBLEM, "does not exist"),
        (Topic((), 4, 3, 1), 4, PROBLEM, "1 partitions of topic t have no leader"),
        (Topic((), 4, 1, 0), 4, WARNING, "replication factor of 1"),
    ],
)
def test_partitions_are_checked(
    topic: Topic, lanes: int, severity: bool | None, words: str
) -> None:
    findings = check_partitions("t", topic, lanes)
    assert worst(findings) is severity
    assert words in " ".join(finding.what for finding in findings)


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({}, OK),
        ({"cleanup.policy": "compact,delete"}, PROBLEM),
        ({"min.insync.replicas": "1"}, WARNING),
        ({"retention.ms": "3600000"}, WARNING),
        ({"retention.ms": "-1"}, OK),
        ({"retention.bytes": "1000"}, WARNING),
        ({"unclean.leader.election.enable": "true"}, WARNING),
    ],
)
def test_settings_are_checked(change: dict[str, str], severity: bool | None) -> None:
    assert worst(check_configs("t", GOOD | change, 3)) is severity


@pytest.mark.slow
async def test_a_topic_is_found_and_an_absent_one_is_not_created(
    cluster: MockCluster, resolver: CachingResolver
) -> None:
    policy = EgressPolicy(["127.0.0.0/8"])
    for topic, words in (("events", "4 partitions for 9 lanes"), ("absent", "does not exist")):
        address = address_of(cluster.server, topic, timeout_s=1.0)
        findings = await check_topic(address, policy, resolver, lanes=9)
        assert worst(findings) is PROBLEM
        assert any(words in finding.what for finding in findings)
    again = await check_topic(address_of(cluster.server, "absent"), policy, resolver, lanes=1)
    assert "does not exist" in again[0].what


@pytest.mark.slow
async def test_an_unreachable_or_refused_server_is_a_problem(
    cluster: MockCluster, resolver: CachingResolver
) -> None:
    for server, policy in (
        ("127.0.0.1:1", EgressPolicy(["127.0.0.0/8"])),
        (cluster.server, EgressPolicy()),
    ):
        address = address_of(server, "events", timeout_s=1.0)
        (finding,) = await check_topic(address, policy, resolver, lanes=1)
        assert finding.is_error


@pytest.mark.skipif(REAL is None, reason="OUTBOX_TEST_KAFKA names no cluster")
async def test_the_settings_of_a_topic_are_read(resolver: CachingResolver) -> None:
    async with real_topic() as topic:
        policy = EgressPolicy(["127.0.0.0/8"])
        findings = await check_topic(address_of(REAL or "", topic), policy, resolver, lanes=4)
        assert worst(findings) in (OK, WARNING)
        assert not any("cannot be read" in finding.what for finding in findings)


async def test_a_cluster_with_too_many_servers_is_not_checked(resolver: CachingResolver) -> None:
    """Each of them would be looked up, and checked again while messages are sent."""
    checks = ServerChecks(EgressPolicy(["127.0.0.0/8"]), resolver, (), secure=False)
    servers = [Server("127.0.0.1", port) for port in range(1, 2 + SERVERS_NAMED_MAX)]
    assert await checks.check(servers[1:]) is None
    stop = await checks.check(servers)
    assert stop is not None
    assert stop.kind is StopKind.MISCONFIGURED
