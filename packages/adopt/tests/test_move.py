"""End to end: large outbox tables are adopted with the commands, under load.  Prints the times."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.messages.signature import parse_secret
from outbox_devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from packages.adopt.tests.legacy_outbox import KEYS, LegacyOutbox
from tests.support.process import Ended, relay_process
from tests.support.process import outbox as command
from tests.support.relay import exceptions, fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]

ROWS = 50_000
ADOPT_S_MAX = 180.0
"""A cut-over of these rows takes 17 s alone, and a few times as long beside other tests."""
MAPPING = (
    *("--type", "kind", "--key", "Order Id", "--payload", "body"),
    *("--sent-column", "sent_at", "--once", "message_id", "--accept-collisions"),
)


class Move:
    """A relay, its receiver, and the commands with their times."""

    def __init__(self, database: Database, legacy: LegacyOutbox) -> None:
        self.database = database
        self.legacy = legacy
        self.env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
        self.got: list[HandledRequest] = []
        self.accepted = 0

    @asynccontextmanager
    async def relay(self, rng: random.Random, log: Path) -> AsyncIterator[None]:
        receiver = DevelopmentReceiver(on_request=self._receive, from_start=True, rng=rng)
        async with receiver.serve() as url:
            add = ("endpoint", "add", "shop", url, "--type", "order.**", "--lanes", "4", "--json")
            added = await command(*add, env=self.env)
            receiver.secrets = (parse_secret(added.json["secret"]),)
            async with relay_process(self.env, log):
                yield
                rows = sum(self.legacy.written.values()) - len(self.legacy.sent)
                await until(lambda: self.accepted >= rows, 300, "all rows")
        assert receiver.totals().good

    def _receive(self, request: HandledRequest) -> None:
        self.got.append(request)
        self.accepted += request.outcome is HandledOutcome.ACCEPTED

    async def adopt(self, verb: str, *words: str, code: int = 0) -> Ended:
        began = time.perf_counter()
        arguments = tuple(
            each for each in words if each != "--accept-collisions" or verb == "start"
        )
        ended = await command(
            "adopt", verb, "app.events", *arguments, env=self.env, timeout_s=ADOPT_S_MAX
        )
        assert ended.code == code, ended.stdout + ended.stderr
        print(f"adopt {verb}: {time.perf_counter() - began:.2f} s")
        if verb == "start":
            # As autovacuum does at some time: while the ledger is nearly empty.
            async with self.database.connection() as db:
                await db.execute("ANALYZE app.events")
                await db.execute("ANALYZE relay.adopted_row")
        return ended

    async def more_rows(self) -> None:
        """Wait for rows that are written from now on."""
        before = sum(self.legacy.written.values())
        await until(lambda: sum(self.legacy.written.values()) > before + 200, what="new rows")

    def delivered(self) -> list[dict[str, Any]]:
        accepted = [each for each in self.got if each.outcome is HandledOutcome.ACCEPTED]
        return [each.message.data for each in accepted if each.message is not None]

    async def check(self) -> None:
        await self.adopt("verify")
        assert await exceptions(self.database) == {}
        print(
            f"{len(self.legacy.sent)} sent by the old poller, {len(self.delivered())} delivered; "
            f"the longest write took {self.legacy.longest_write_s:.2f} s"
        )


@pytest.mark.parametrize("poller", ["locks-rows", "marks-later"])
async def test_a_poller_goes_on(
    database: Database, rng: random.Random, tmp_path: Path, poller: Any
) -> None:
    move = Move(database, legacy := LegacyOutbox(database, rng))
    await legacy.create(ROWS)
    async with (
        move.relay(rng, tmp_path / "relay.log"),
        legacy.applications(),
        legacy.poller(poller),
    ):
        await move.adopt("plan", *MAPPING)
        await move.adopt("start", *MAPPING)
        await until(lambda: len(legacy.sent) > 500, what="the old poller")
        await move.adopt("cut-over", "--poller", poller, "--settle", "2s")
        sent = len(legacy.sent)
        await move.more_rows()
    assert len(legacy.sent) == sent
    legacy.check(move.delivered())
    await move.check()


async def test_duplicates(database: Database, rng: random.Random, tmp_path: Path) -> None:
    move = Move(database, legacy := LegacyOutbox(database, rng))
    await legacy.create(ROWS // 2)
    async with database.connection() as db:
        await db.execute(
            """INSERT INTO app.events (message_id, kind, "Order Id", body)
               SELECT message_id, kind, "Order Id", body FROM app.events ORDER BY id"""
        )
    async with move.relay(rng, tmp_path / "relay.log"), legacy.applications():
        await move.adopt("start", *MAPPING)
        cut = await move.adopt("cut-over", "--poller", "stopped", "--json")
        assert cut.json["duplicates"] == ROWS // 2
        await move.more_rows()
    legacy.check(move.delivered())
    await move.check()


async def test_bad_topics(database: Database, rng: random.Random, tmp_path: Path) -> None:
    """Rows without a usable type have keys of their own, because they are published later."""
    move = Move(database, legacy := LegacyOutbox(database, rng))
    legacy.kinds = ("order: Created!", "order/paid", "order.späte Änderung")
    await legacy.create(ROWS)
    bad = """INSERT INTO app.events (kind, "Order Id", body)
             SELECT '', 'bad', json_build_object('key', 'bad', 'n', n)
               FROM generate_series(0, 499) AS n"""
    async with database.connection() as db:
        await db.execute(bad)
    legacy.written["bad"] = 500
    async with move.relay(rng, tmp_path / "relay.log"), legacy.applications():
        await move.adopt("plan", *MAPPING, code=1)
        await move.adopt("start", *MAPPING)
        refused = await move.adopt("cut-over", "--poller", "stopped", code=2)
        assert "500 pending rows would be rejected" in refused.stderr
        await move.adopt("cut-over", "--poller", "stopped", "--accept-rejected")
        await move.adopt("verify", code=1)
        await fetchval(database, "UPDATE app.events SET kind = 'order.mended' WHERE kind = ''")
        again = await move.adopt("cut-over", "--poller", "stopped", "--json")
        assert orjson.loads(again.stdout)["published"] == 500
        await move.more_rows()
    assert len(legacy.written) == KEYS + 1
    legacy.check(move.delivered())
    await move.check()
