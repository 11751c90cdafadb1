"""Wrong versions of what recognizes a restore: a number gets two events, or a lane ends."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.errors import CursorBroken
from outbox.store.cluster import timeline
from outbox.store.cluster.replicas import Renewal
from outbox.store.errors import Fenced
from outbox.store.sql.expressions import SERVER_FENCE
from outbox.store.sql.message import WriteStatement
from tests.integration.test_restore import PATH, deliver, expect_unique_numbers
from tests.integration.test_restore_in_place import DATA, WAYS, drop_schema, try_to_lead
from tests.integration.test_timeline import Leader
from tests.support.dumps import dump, parts, restore, truncate
from tests.support.relay import add_endpoint, exceptions, fetchval, publish

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.costly, pytest.mark.full]


@dataclass(frozen=True)
class Mutant:
    sql: str = ""
    patches: dict[str, Any] = field(default_factory=dict)


INCARNATION_NOT_COMPARED = Mutant(
    "CREATE OR REPLACE FUNCTION incarnation_holds() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
    {"READ_CURSOR": timeline.READ_CURSOR.replace(timeline.INCARNATION, "true")},
)
COUNTERS_NOT_COMPARED = Mutant(
    "CREATE OR REPLACE FUNCTION advance_lane_counter(lane bigint, old_seq bigint, new_seq bigint)"
    " RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS"
    " 'UPDATE lane_counter SET last_seq = $3 WHERE lane_id = $1 AND last_seq = $2'"
)
COUNTER_WITH_DEFAULT = Mutant(
    "ALTER TABLE lane_counter ALTER by_xid SET DEFAULT pg_current_xact_id()::xid::text::bigint"
)
TIMELINE_FENCE = Mutant(
    "CREATE OR REPLACE FUNCTION server_fence() RETURNS bigint LANGUAGE sql"
    " SET search_path FROM CURRENT AS 'SELECT server_timeline()'"
)
LABEL_FENCE = Mutant(
    "CREATE OR REPLACE FUNCTION server_fence() RETURNS bigint LANGUAGE sql"
    " SET search_path FROM CURRENT AS"
    " 'SELECT server_timeline() << 32 | by_xid FROM incarnation'"
)
NOT_PROVED_WHOLE = Mutant(
    patches={"REQUIRE_WHOLE": WriteStatement("require_whole", "SELECT abort_unless(true)")}
)
NONE = Mutant()


def call_server_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every statement call the function, instead of the expression that stands for it."""
    stores = [module for name, module in sys.modules.items() if name.startswith("outbox.store.")]
    for module in stores:
        for name, value in vars(module).copy().items():
            if isinstance(value, WriteStatement) and SERVER_FENCE in value.sql:
                sql = value.sql.replace(SERVER_FENCE, "server_fence()")
                monkeypatch.setattr(module, name, replace(value, sql=sql))
            elif isinstance(value, str) and SERVER_FENCE in value and name != "SERVER_FENCE":
                monkeypatch.setattr(module, name, value.replace(SERVER_FENCE, "server_fence()"))


async def apply(mutant: Mutant, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mutant.patches.items():
        monkeypatch.setattr(timeline, name, value)
    if "server_fence" in mutant.sql:
        call_server_fence(monkeypatch)
    if mutant.sql:
        async with database.connection(**PATH) as db:
            await db.execute(mutant.sql)


@pytest.mark.parametrize(
    ("way", "mutant", "is_wrong"),
    [
        ("data", NONE, False),
        (
            "data",
            Mutant(
                INCARNATION_NOT_COMPARED.sql + ";" + COUNTERS_NOT_COMPARED.sql,
                INCARNATION_NOT_COMPARED.patches,
            ),
            True,
        ),
        ("older version", NONE, False),
        ("older version", COUNTERS_NOT_COMPARED, True),
        ("older version", COUNTER_WITH_DEFAULT, True),
    ],
    ids=["data", "data, nothing compared", "older", "older, counters", "older, default"],
)
async def test_numbers_are_used_twice(
    way: str,
    mutant: Mutant,
    is_wrong: bool,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await add_endpoint(database)
    await apply(mutant, database, monkeypatch)
    known = [await deliver(database, 1)]
    dumped = await WAYS[way].dump(database)
    known.append(await deliver(database, "lost"))
    await WAYS[way].clear(database)
    await restore(database, dumped)
    known.append(await deliver(database, "new"))
    if is_wrong:
        with pytest.raises(AssertionError):
            expect_unique_numbers(*known)
    else:
        expect_unique_numbers(*known)


@pytest.mark.parametrize(
    ("mutant", "is_wrong"),
    [(NONE, False), (TIMELINE_FENCE, True), (LABEL_FENCE, True)],
    ids=["real", "timeline", "label"],
)
async def test_a_session_writes_into_a_restored_state(
    mutant: Mutant, is_wrong: bool, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump has the row of a replica whose lease runs."""
    made = await add_endpoint(database)
    await apply(mutant, database, monkeypatch)
    leader = await Leader(database).begin()
    await leader.turn()
    dumped = await dump(database)
    await drop_schema(database)
    await restore(database, dumped)
    leader.db = await database.connect(**PATH)
    leader.replicas._db = leader.db
    claimed = await leader.replicas.claim(leader.id, [made.id], "test")
    assert bool(claimed) is is_wrong
    renewal = await leader.replicas.renew(leader.id)
    assert (renewal is not Renewal.FENCED) is is_wrong


@pytest.mark.parametrize(
    ("mutant", "is_wrong"), [(NONE, False), (NOT_PROVED_WHOLE, True)], ids=["real", "no proof"]
)
async def test_lanes_are_begun_on_half_a_restore(
    mutant: Mutant, is_wrong: bool, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, lanes=2)
    await deliver(database, 1)
    # What a leader needs first comes first: PostgreSQL gives no promise on the order.
    early = ("period", "incarnation", "cursor", "batch_0", "odometer")
    dumped = sorted(
        parts(await dump(database, DATA)),
        key=lambda part: not any(f"COPY relay.{table} (" in part for table in early),
    )
    await truncate(database)
    await apply(mutant, database, monkeypatch)
    for part in dumped:
        await restore(database, part)
        if "COPY relay.lane_counter (" in part:
            with suppress(CursorBroken, Fenced):
                await try_to_lead(database)
    await publish(database, 2)
    assert ("whole" in await exceptions(database)) is is_wrong
    if not is_wrong:
        assert (await deliver(database, 3)).data() == [2, 3]
        assert await fetchval(database, "SELECT incarnation_holds()")
