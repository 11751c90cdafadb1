"""Failures of the relay's own process, which librdkafka reports as failed connects."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError

from outbox.core.brokers.port import StopKind
from outbox_brokers.kafka.failures import (
    Troubles,
    is_local,
    stop_before_sending,
    stop_without_client,
)

NO_DESCRIPTOR = f"10.0.0.1:9092/1: Failed to create socket: {os.strerror(errno.EMFILE)} (after 0ms)"
NO_PORT = "10.0.0.1:9092/1: Connect to ipv4#10.0.0.1:9092 failed: Cannot assign requested address"
REFUSED = "10.0.0.1:9092/1: Connect to ipv4#10.0.0.1:9092 failed: Connection refused (after 0ms)"


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (KafkaError._TRANSPORT, NO_DESCRIPTOR, True),
        (KafkaError._TRANSPORT, NO_PORT, True),
        (KafkaError._CRIT_SYS_RESOURCE, "Failed to create thread", True),
        (KafkaError._TRANSPORT, REFUSED, False),
        # A host without IPv6 says so of each IPv6 address.
        (KafkaError._TRANSPORT, NO_PORT.replace("ipv4#10.0.0.1", "ipv6#[::1]"), False),
        # A server's own words.
        (KafkaError.SASL_AUTHENTICATION_FAILED, NO_DESCRIPTOR, False),
        (KafkaError._TRANSPORT, f"10.0.0.1:9092/1: Disconnected: {NO_DESCRIPTOR}", False),
    ],
)
def test_errors_of_this_process_are_local(code: int, text: str, expected: bool) -> None:
    error = KafkaError(code, text)
    assert is_local(error) is expected
    assert (stop_before_sending(error).kind is StopKind.LOCAL) is expected


def test_a_client_that_cannot_be_made() -> None:
    for error in (MemoryError(), RuntimeError("can't start new thread"), OSError(errno.EMFILE, "")):
        assert stop_without_client(error).kind is StopKind.LOCAL
    wrong = KafkaError(KafkaError._INVALID_ARG, "No such configuration property")
    assert stop_without_client(Exception(wrong)).kind is StopKind.MISCONFIGURED


def test_an_error_of_an_earlier_call_is_not_this_ones() -> None:
    troubles = Troubles()
    troubles.report(KafkaError(KafkaError._TRANSPORT, NO_DESCRIPTOR))
    assert troubles.stop(None, 5.0).kind is StopKind.LOCAL
    assert troubles.stop(None, 0.0).kind is StopKind.UNAVAILABLE
    troubles.report(KafkaError(KafkaError._TRANSPORT, REFUSED))
    assert troubles.stop(None, 5.0).kind is StopKind.UNAVAILABLE
    assert not troubles.are_local


CHILD = """
import asyncio, os, resource
from tests.support.brokers.kafka import OWNER, MockCluster, broker_at, messages

async def run():
    cluster = MockCluster()
    cluster.create_topic("events", 1)
    async with broker_at(cluster.server, "events", timeout_s=3) as broker:
        # None is free, also when one of another thread is closed: the standard ones are open.
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        print((await broker.open("ep-1-0", OWNER, 0, None)).kind.name, flush=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        while not hasattr(await broker.open("ep-1-0", OWNER, 0, None), "sequence"):
            pass
        appended = await broker.append("ep-1-0", OWNER, 0, messages("ep-1-0", [1]))
        print(appended.through, flush=True)
    os._exit(0)

asyncio.run(run())
"""


@pytest.mark.system
@pytest.mark.slow
def test_without_descriptors_a_lane_is_not_opened_and_nothing_is_charged() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.split() == ["LOCAL", "1"], ended.stderr
