"""Findings of `outbox doctor` about the streams of an endpoint; nothing is created or published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rstream import schema
from rstream.constants import OffsetType

from outbox.destinations.broker import BrokerFinding
from outbox_brokers.rabbitmq.connection import Rejected
from outbox_brokers.rabbitmq.leader import find
from outbox_brokers.rabbitmq.position import delete_publisher, unsubscribe
from outbox_brokers.rabbitmq.stops import NO_STREAM, code_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_brokers.rabbitmq.connection import StreamConnection
    from outbox_brokers.rabbitmq.leader import Nodes, Placement
    from outbox_brokers.rabbitmq.target import StreamTarget


async def check_streams(
    nodes: Nodes, target: StreamTarget, lanes: Sequence[str]
) -> list[BrokerFinding]:
    """Check the streams of lanes.

    Raises:
        Stopped, Lost: the server cannot be reached, or refuses the user.
    """
    locator = await nodes.locator()
    findings: list[BrokerFinding] = []
    for lane in lanes:
        stream = target.stream_of(lane)
        placement = await find(locator, stream)
        if placement is not None:
            findings += await _check_stream(nodes, placement, stream)
        elif not target.create:
            findings.append(
                BrokerFinding(
                    True,
                    f"stream {stream}: {code_name(NO_STREAM)}",
                    "create it, or add create=1 to the URL",
                )
            )
    return findings


async def _check_stream(nodes: Nodes, placement: Placement, stream: str) -> list[BrokerFinding]:
    connection = await nodes.leader(placement)
    slot = connection.take_slot()
    findings: list[BrokerFinding] = []
    try:
        for right, attempt in (("write", _try_publishing), ("read", _try_reading)):
            try:
                await attempt(connection, slot, stream)
            except Rejected as error:
                findings.append(
                    BrokerFinding(
                        True,
                        f"stream {stream}, right to {right}: {code_name(error.code)}",
                        f"rabbitmqctl set_permissions, with the right to {right} the stream",
                    )
                )
    except BaseException:
        connection.abort("a check was cancelled, or had no response")
        raise
    connection.free_slot(slot)
    if placement.replicas == 0:
        findings.append(
            BrokerFinding(
                False,
                f"stream {stream} is on one node only: what it confirmed is lost with the node, "
                "and the lane is then held",
                "create streams with replicas on other nodes",
            )
        )
    return findings


async def _try_publishing(connection: StreamConnection, slot: int, stream: str) -> None:
    # Without a name: nothing of it stays.
    await connection.exchange(
        schema.DeclarePublisher,
        schema.DeclarePublisherResponse,
        publisher_id=slot,
        stream=stream,
        reference="",
    )
    await delete_publisher(connection, slot)


async def _try_reading(connection: StreamConnection, slot: int, stream: str) -> None:
    await connection.exchange(
        schema.Subscribe,
        schema.SubscribeResponse,
        subscription_id=slot,
        stream=stream,
        offset_spec=schema.OffsetSpec(OffsetType.NEXT),
        credit=0,
        properties=[],
    )
    await unsubscribe(connection, slot)
