"""URLs of Kafka topics."""

from __future__ import annotations

import pytest

from outbox.core.brokers.broker_url import Server
from outbox.errors import UsageError
from outbox_brokers.kafka.target import (
    KafkaTarget,
    parse_url,
    partition_of,
)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        (
            "kafka://10.0.0.1/events",
            KafkaTarget((Server("10.0.0.1", 9092),), "events", False, "SCRAM-SHA-512"),
        ),
        (
            "kafka+tls://A.example.com,b.example.com:19093/my.events_1-x",
            KafkaTarget(
                (Server("a.example.com", 9093), Server("b.example.com", 19093)),
                "my.events_1-x",
                True,
                "PLAIN",
            ),
        ),
        (
            "kafka://[::1]:9999/t?sasl=scram-sha-256",
            KafkaTarget((Server("::1", 9999),), "t", False, "SCRAM-SHA-256"),
        ),
    ],
)
def test_a_url_names_servers_topic_and_mechanism(url: str, target: KafkaTarget) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kafka://user:secret@host/t", "outbox endpoint credentials"),
        ("kafka:///t", "has no host"),
        ("kafka://host", "names no topic"),
        ("kafka://host/a/b", "is not a topic"),
        ("kafka://host/__consumer_offsets", "is not a topic"),
        ("kafka://host/..", "is not a topic"),
        (f"kafka://host/{'t' * 250}", "is not a topic"),
        ("kafka://host:65536/t", "port 65536 is not valid"),
        ("kafka://a,,b/t", "has no valid server"),
        ("kafka://host/t#x", "fragment"),
        ("kafka://host/t?acks=0", "unknown option"),
        ("kafka://host/t?exact=1", "unknown option"),
        ("kafka://host/t?sasl=plain&sasl=plain", "given twice"),
        ("kafka://host/t?sasl=gssapi", "must be plain"),
        ("kafka://" + ",".join(f"h{n}" for n in range(17)) + "/t", "names 17 servers; at most 16"),
        ("http://host/t", "must start with kafka://"),
        ("kafka:host/t", "must start with kafka://"),
        ("kafka://h\N{LATIN SMALL LETTER O WITH DIAERESIS}st/t", "visible ASCII"),
        ("kafka://host/" + "t" * 3000, "longer than"),
    ],
)
def test_another_url_is_refused_with_the_reason_in_one_line(url: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_url(url)
    assert str(refused.value).startswith("url: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_slot_of_a_lane_is_its_partition() -> None:
    assert partition_of("billing-eu-2-17") == 17


@pytest.mark.parametrize("lane", ["billing", "billing-x", "billing-", "billing-1-99999999999"])
def test_a_lane_without_a_slot_is_refused(lane: str) -> None:
    with pytest.raises(UsageError):
        partition_of(lane)
