"""What the suite of destinations shows about Kafka, whose client library connects by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("confluent_kafka")

from outbox_brokers.plugins import KAFKA
from outbox_devtools.destination_suite.egress import (
    refused_exposures,
    renamed_exposures,
    served_exposures,
)
from tests.support.brokers.kafka import MockCluster, address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.destination import BrokerAddress, Server

pytestmark = pytest.mark.full

TOPIC = "events"


class KafkaRig:
    """A mock cluster."""

    destination = KAFKA
    lanes = ("ep-1-0", "ep-1-1", "ep-1-2")

    def __init__(self, cluster: MockCluster) -> None:
        self._cluster = cluster

    def address(self, server: Server | None = None) -> BrokerAddress:
        return address_of(str(server or self._cluster.server), TOPIC)


@pytest.fixture
def rig() -> Iterator[KafkaRig]:
    cluster = MockCluster()
    cluster.create_topic(TOPIC, 3)
    yield KafkaRig(cluster)
    cluster.close()


async def test_the_suite_shows_that_not_every_address_is_checked(rig: KafkaRig) -> None:
    # The servers of the URL are checked before the client is made.
    assert await refused_exposures(rig) == []
    # It resolves their names itself, and its threads are not observed.
    (connected,) = await renamed_exposures(rig)
    assert connected.startswith("127.0.0.1:")
    assert await served_exposures(rig) == ["opened a lane, and no connection was seen"]
    assert not KAFKA.checks_every_address
