"""Findings of `outbox doctor` about the streams of an endpoint; nothing is created or published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rstream import schema
from rstream.constants import OffsetType

from outbox.destinations.rabbitmq.connection import Rejected
from outbox.destinations.rabbitmq.leader import find
from outbox.destinations.rabbitmq.position import delete_publisher, unsubscribe
from outbox.destinations.rabbitmq.stops import NO_STREAM, code_name

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from outbox.destinations.rabbitmq.connection import StreamConnection
    from outbox.destinations.rabbitmq.leader import Nodes, Placement
    from outbox.destinations.rabbitmq.target import StreamTarget

RETENTION = (
    "retention cannot be read over the stream protocol: see max-age and max-length-bytes in "
    "`rabbitmqctl list_queues name arguments policy`; what it removes is lost to readers that have "
    "not read it"
)


class Finding(NamedTuple):
    """One result of the check."""

    is_problem: bool
    text: str


async def check_streams(nodes: Nodes, target: StreamTarget, lanes: Sequence[str]) -> list[Finding]:
    """Check the streams of lanes.

    Raises:
        Stopped, Lost: the server cannot be reached, or refuses the user.
    """
    locator = await nodes.locator()
    findings = [Finding(False, f"the stream plugin answers at {target.host}:{target.port}")]
    for lane in lanes:
        stream = target.stream_of(lane)
        placement = await find(locator, stream)
        if placement is None:
            findings.append(_absent(stream, target.create))
        else:
            findings += await _check_stream(nodes, placement, stream)
    findings.append(Finding(False, RETENTION))
    return findings


def _absent(stream: str, create: bool) -> Finding:
    if create:
        return Finding(
            False,
            f"stream {stream} does not exist, and is created with the lane's first delivery, which "
            "needs the right to configure it",
        )
    return Finding(
        True, f"stream {stream}: {code_name(NO_STREAM)}; create it, or add create=1 to the URL"
    )


async def _check_stream(nodes: Nodes, placement: Placement, stream: str) -> list[Finding]:
    connection = await nodes.leader(placement)
    slot = connection.take_slot()
    try:
        findings = [
            await _check_right(_try_publishing(connection, slot, stream), stream, "write"),
            await _check_right(_try_reading(connection, slot, stream), stream, "read"),
        ]
    except BaseException:
        connection.abort("a check was cancelled, or had no answer")
        raise
    connection.free_slot(slot)
    if placement.replicas == 0:
        findings.append(
            Finding(
                True,
                f"stream {stream} is on one node only: what it confirmed is lost with the node, "
                "and the lane is then held",
            )
        )
    else:
        findings.append(Finding(False, f"stream {stream} has {placement.replicas + 1} replicas"))
    return findings


async def _check_right(attempt: Coroutine[Any, Any, None], stream: str, right: str) -> Finding:
    try:
        await attempt
    except Rejected as error:
        return Finding(True, f"stream {stream}, right to {right}: {code_name(error.code)}")
    return Finding(False, f"stream {stream}: the user has the right to {right}")


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
