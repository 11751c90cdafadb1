"""What the migration says about a state that older relays have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.store.schema.migrate_in_transaction import statements_for

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

BEFORE, AT = 17, 18
BATCHES = "INSERT INTO relay.batch (batch, high) SELECT b, 0 FROM generate_series({}, {}) AS b"


@pytest.mark.parametrize(
    ("batches", "holds"),
    [
        pytest.param([], True, id="no batch"),
        pytest.param([(1, 1), (2, 2)], True, id="each batch in its transaction"),
        pytest.param([(1, 2)], False, id="restored at once"),
        pytest.param([(1, 2), (3, 3)], True, id="restored long ago"),
    ],
)
async def test_the_migration_vouches_only_for_what_relays_have_written(
    batches: list[tuple[int, int]], holds: bool, empty_database: Database
) -> None:
    """Also in a subtransaction, in which migration tools may run it."""
    async with empty_database.connection() as db:
        async with db.transaction():
            for statement in statements_for("relay", BEFORE):
                await db.execute(statement)
        for first, last in batches:
            await db.execute(BATCHES.format(first, last))
        async with db.transaction(), db.transaction():
            for statement in statements_for("relay", AT):
                await db.execute(statement)
        assert await db.fetchval("SELECT relay.incarnation_holds()") is holds
