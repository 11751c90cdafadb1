from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers
from outbox.network import reuse_limits
from tests.support.brokers.moving import NAME, NEW, OLD, Appending, meet_closes, moving_name
from tests.support.brokers.rabbitmq import PASSWORD, USER
from tests.support.brokers.rigs import LOOPBACK
from tests.support.waiting import until

if TYPE_CHECKING:
    from packages.brokers.tests.rabbitmq.conftest import Stage

pytestmark = pytest.mark.full

LANES = ("ep-1-0", "ep-1-1", "ep-1-2")


async def test_lanes_follow_a_name_and_lose_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lane is opened again on the new connection; the old one ends when nothing is awaited."""
    monkeypatch.setattr(reuse_limits, "ADDRESS_CHECK_S", 0.0)
    async with moving_name(stage.server.port) as name:
        url = f"rabbitmq-stream://{NAME}:{name.port}/{stage.prefix}?create=1"
        address = BrokerAddress(url, f"{USER}:{PASSWORD}", timeout_s=10)
        broker = Brokers(LOOPBACK, name).connect(address)
        appending = Appending(broker, LANES)
        running = asyncio.create_task(appending.run())
        for new in (NEW, OLD, NEW):
            before = dict(appending.through)
            await until(
                lambda before=before: (  # type: ignore[misc]
                    running.done() or all(appending.through[each] > before[each] for each in LANES)
                ),
                what="all lanes to go on",
            )
            assert appending.stops == []
            name.address, left = new, name.address
            await until(
                lambda left=left, new=new: (  # type: ignore[misc]
                    name.ways[new].is_used and not name.ways[left].is_used
                ),
                what="the new address alone",
            )
        appending.stop()
        await running
        await broker.aclose()
    assert appending.stops == []
    for lane in LANES:
        stored = await stage.raw.sequences(f"{stage.prefix}.{lane}")
        assert stored == list(range(1, appending.through[lane] + 1))


@pytest.mark.parametrize("lost", ["request", "response"])
async def test_the_close_of_an_idle_connection_is_no_failure(stage: Stage, lost: str) -> None:
    async with moving_name(stage.server.port) as name:
        url = f"rabbitmq-stream://{NAME}:{name.port}/{stage.prefix}?create=1"
        address = BrokerAddress(url, f"{USER}:{PASSWORD}", timeout_s=10)
        broker = Brokers(LOOPBACK, name).connect(address)
        appending = Appending(broker, LANES[:1])
        await meet_closes(appending, name.ways[OLD], lost)
        await broker.aclose()
    assert appending.stops == []
    (lane,) = appending.through
    stored = await stage.raw.sequences(f"{stage.prefix}.{lane}")
    assert stored == list(range(1, appending.through[lane] + 1))
