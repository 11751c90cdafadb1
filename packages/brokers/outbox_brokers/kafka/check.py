"""Checks of a topic and its cluster, for `outbox doctor` and before an endpoint is added."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from outbox.core.brokers.port import Stop
from outbox.core.model.response import one_line
from outbox.destinations.broker import BrokerFinding, stopped_finding
from outbox.errors import UsageError
from outbox_brokers.kafka.egress import ServerChecks
from outbox_brokers.kafka.failures import CLIENT_ERRORS, describe, error_of
from outbox_brokers.kafka.loops import SILENT
from outbox_brokers.kafka.reader import Places, Reader, Topic
from outbox_brokers.kafka.settings import client_settings
from outbox_brokers.kafka.target import parse_url

if TYPE_CHECKING:
    from outbox.destinations.broker import BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox_brokers.kafka.settings import Settings
    from outbox_brokers.kafka.target import KafkaTarget

_WHAT_TO_DO = "check the URL, the credentials (outbox endpoint credentials) and the networks"

REPLICAS_MIN = 3
IN_SYNC_MIN = 2
RETENTION_MIN_S = 24 * 3600
_CONFIGS = ("cleanup.policy", "retention.ms", "retention.bytes", "min.insync.replicas")
_UNCLEAN = "unclean.leader.election.enable"


async def check_topic(
    address: BrokerAddress, policy: EgressPolicy, resolver: Resolver, lanes: int
) -> list[BrokerFinding]:
    """Check whether an endpoint with so many lanes can deliver to a topic.

    Nothing is written, so the right to write is not shown.

    Raises:
        UsageError: the URL, the credentials or the TLS settings are not usable.
    """
    target = parse_url(address.url)
    settings = await asyncio.to_thread(client_settings, target, address)
    checks = ServerChecks(policy, resolver, address.networks, secure=target.secure)
    if (stop := await checks.check(target.servers)) is not None:
        return [stopped_finding(stop, _WHAT_TO_DO)]
    loop = asyncio.get_running_loop()
    try:
        reader = Reader(loop, settings, target.topic, Places())
    except CLIENT_ERRORS as error:
        raise UsageError(f"url: {describe(error_of(error))}") from None
    try:
        async with asyncio.timeout(address.timeout_s):
            topic = await reader.topic(time.monotonic() + address.timeout_s)
            if not isinstance(topic, Stop):
                topic = await checks.check(topic.servers) or topic
    except TimeoutError:
        detail = f"no response within {address.timeout_s:g} s"
        return [BrokerFinding(True, detail, _WHAT_TO_DO, is_away=True)]
    finally:
        reader.discard()
    if isinstance(topic, Stop):
        return [stopped_finding(topic, _WHAT_TO_DO)]
    findings = check_partitions(target.topic, topic, lanes)
    if topic.partitions:
        configs = await asyncio.to_thread(_read_configs, settings, target, address.timeout_s)
        if isinstance(configs, str):
            findings.append(
                BrokerFinding(
                    False,
                    f"the settings of topic {target.topic} cannot be read: {configs}",
                    "allow DescribeConfigs on the topic, or check them by hand",
                )
            )
        else:
            findings += check_configs(target.topic, configs, topic.replicas)
    return findings


def check_partitions(name: str, topic: Topic, lanes: int) -> list[BrokerFinding]:
    """Check what the metadata says of a topic."""
    if not topic.partitions:
        return [
            BrokerFinding(
                True,
                f"topic {name} does not exist, or the user has no right to describe it",
                f"create it with at least {lanes} partitions",
            )
        ]
    findings: list[BrokerFinding] = []
    if topic.partitions < lanes:
        findings.append(
            BrokerFinding(
                True,
                f"topic {name} has {topic.partitions} partitions for {lanes} lanes",
                f"add partitions, or give the endpoint at most {topic.partitions} lanes",
            )
        )
    if topic.leaderless:
        findings.append(
            BrokerFinding(
                True,
                f"{topic.leaderless} partitions of topic {name} have no leader",
                "look at the cluster: lanes of these partitions wait",
            )
        )
    if topic.replicas < REPLICAS_MIN:
        findings.append(
            BrokerFinding(
                False,
                f"topic {name} has a replication factor of {topic.replicas}",
                f"use {REPLICAS_MIN}, or the failure of one server loses what it had acknowledged",
            )
        )
    return findings


def check_configs(name: str, configs: dict[str, str], replicas: int) -> list[BrokerFinding]:
    """Check the settings of a topic."""
    findings: list[BrokerFinding] = []
    if "compact" in configs.get("cleanup.policy", ""):
        findings.append(
            BrokerFinding(
                True,
                f"topic {name} is compacted: of each key only the last event remains, and the "
                "sequences of lanes have holes",
                "set cleanup.policy to delete",
            )
        )
    if _number(configs, "min.insync.replicas", IN_SYNC_MIN) < IN_SYNC_MIN and replicas > 1:
        findings.append(
            BrokerFinding(
                False,
                f"topic {name} acknowledges messages that one replica has",
                f"set min.insync.replicas to {IN_SYNC_MIN}",
            )
        )
    if configs.get(_UNCLEAN) == "true":
        findings.append(
            BrokerFinding(
                False,
                f"a replica of topic {name} that lacks messages may become the leader",
                f"set {_UNCLEAN} to false",
            )
        )
    retention_ms = _number(configs, "retention.ms", -1)
    if 0 <= retention_ms < RETENTION_MIN_S * 1000:
        findings.append(
            BrokerFinding(
                False,
                f"topic {name} keeps messages for {retention_ms / 3_600_000:.3g} hours",
                "keep them longer than the longest outage of a reader",
            )
        )
    if _number(configs, "retention.bytes", -1) >= 0:
        findings.append(
            BrokerFinding(
                False,
                f"topic {name} keeps {configs['retention.bytes']} bytes of each partition, also of "
                "messages that no reader has seen",
                "set retention.bytes to -1, or watch the lag of readers",
            )
        )
    return findings


def _number(configs: dict[str, str], name: str, default: int) -> int:
    try:
        return int(configs[name])
    except (KeyError, ValueError):
        return default


def _read_configs(
    settings: Settings, target: KafkaTarget, timeout_s: float
) -> dict[str, str] | str:
    """Return the settings of the topic, or why they cannot be read."""
    resource = ConfigResource(ResourceType.TOPIC, target.topic)
    try:
        admin = AdminClient(settings, logger=SILENT)
        (future,) = admin.describe_configs([resource], request_timeout=timeout_s).values()
        entries: dict[str, ConfigEntry] = future.result(timeout_s + 1)
    except CLIENT_ERRORS as error:
        return describe(error_of(error))
    except TimeoutError as error:
        return one_line(str(error)) or "no response"
    return {
        name: entry.value
        for name, entry in entries.items()
        if name in (*_CONFIGS, _UNCLEAN) and entry.value is not None
    }
