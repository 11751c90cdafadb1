import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from outbox_jsonl import JSONL, LINE_BYTES_MAX, JsonlBroker

from outbox.destination import BrokerAddress, Position
from outbox_devtools.destination_suite import OWNER, PATIENT_S, BrokerConformance, Stored, gated


class JsonlRig:
    destination, can_trim, too_large = JSONL, True, LINE_BYTES_MAX
    lanes = ("ep-1-0", "ep-1-1", "ep-1-2")

    def __init__(self, directory):
        self.directory = directory

    def address(self, server=None):
        return BrokerAddress(f"jsonl://localhost{self.directory}")

    def link(self, timeout_s=PATIENT_S):
        broker = JsonlBroker(replace(self.address(), timeout_s=timeout_s), None, None)
        return gated(broker, "_open", "_append")

    @asynccontextmanager
    async def absent(self):
        yield JsonlBroker(BrokerAddress("jsonl://localhost/not/mounted"), None, None)

    def file(self, lane):
        return self.directory / f"{lane}.jsonl"

    async def stored(self, lane):
        lines = self.file(lane).read_text().splitlines() if self.file(lane).exists() else []
        messages = [line for line in map(json.loads, lines) if "body" in line]
        return [Stored(each["sequence"], each["delivery"]) for each in messages]

    async def forget(self, lane):
        self.file(lane).unlink()

    async def trim(self, lane):
        *_, last = self.file(lane).read_bytes().splitlines(keepends=True)
        self.file(lane).write_bytes(last)

    async def write_as_another(self, lane):
        with self.file(lane).open("a") as file:
            file.write("{}\n")


class TestJsonl(BrokerConformance):
    @pytest.fixture
    def rig(self, tmp_path):
        return JsonlRig(tmp_path)

    async def test_a_torn_line_is_cut_off(self, rig):
        async with rig.link() as link:
            await link.broker.open("a", OWNER, 0, None)
            with rig.file("a").open("a") as file:
                file.write('{"sequence": 1')
            opened = await link.broker.open("a", OWNER._replace(opening=2), 0, None)
        assert opened == Position(0, None)
        assert rig.file("a").read_text().count('{"') == 2
