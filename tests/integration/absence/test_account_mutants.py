"""Each part of the accounts is necessary: without it, one of these scenarios finds a difference.

A mutant replaces a part of one function of the schema.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from outbox.core.sequencing.partition_window import Retention
from outbox_doctor.maintenance.resequence import resequence
from outbox_doctor.verify import audit
from tests.support.books import BLOCK, INSERT, INSERT_WITH_ID, sequence_events

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.books import Books

pytestmark = [pytest.mark.costly, pytest.mark.system]

FUNCTION = """
SELECT pg_get_functiondef(oid) FROM pg_proc
 WHERE pronamespace = 'relay'::regnamespace AND proname = $1
"""
UNREADY = """
UPDATE pg_index SET indisready = {0}, indisvalid = {0} WHERE indrelid = 'outbox_0'::regclass
"""


async def _account(books: Books) -> tuple[int, int]:
    """Expected and present events of the first block, before dead ids are counted."""
    expected, present = await books.db.fetchrow("SELECT expected, present FROM account(0, 0)")
    return expected, present


async def rollbacks(books: Books) -> None:
    """Dead ids, before they are counted, after that, and both."""
    await books.publish(2)
    await books.roll_back(2)
    await books.publish(1)
    await books.sequence()
    assert await _account(books) == (3, 3)
    await books.assert_agree()
    await books.roll_back(1)
    await books.publish(1)
    await books.sequence()
    assert await _account(books) == (4, 4)
    await books.assert_agree()


async def open_gap(books: Books) -> None:
    """An open gap, without its row and with it."""
    other = await books.database.connect(server_settings={"search_path": "relay"})
    await books.publish(1)
    await other.execute("BEGIN")
    await other.execute(INSERT)
    await books.publish(1)
    await books.sequence()
    assert await _account(books) == (2, 2)
    await other.execute("COMMIT")
    assert await _account(books) == (2, 2)
    await books.sequence()
    await books.assert_agree()


async def last_block(books: Books) -> None:
    """An event of the last block, which is not full, is deleted."""
    await sequence_events(books)
    await books.db.execute(f"DELETE FROM outbox WHERE id = {(1 << 32) + 1}")
    assert await books.differences() == {(0, 4096): -1}


async def border(books: Books) -> None:
    """The last event of a block and the first one of the next block are deleted."""
    await books.publish(1)
    await books.leap(BLOCK - 2)
    await books.publish(1)
    await books.sequence()
    await books.assert_agree()
    await books.db.execute(f"DELETE FROM outbox WHERE id IN ({BLOCK - 1}, {BLOCK})")
    assert await books.differences() == {(0, 0): -1, (0, 1): -1}


async def leap(books: Books) -> None:
    """More dead ids than are counted in blocks."""
    await sequence_events(books)


async def sequenced_after_all(books: Books) -> None:
    """An operator sequences events whose ids counted as dead."""
    await sequence_events(books)
    await books.db.execute(INSERT_WITH_ID.format(3))
    await resequence(books.db, "relay", actor="test")
    await books.sequence()
    await books.assert_agree()


async def dropped_log(books: Books) -> None:
    """The log with the dead ids is dropped before the events."""
    await books.publish(1)
    await books.roll_back(2)
    await books.publish(1)
    await books.sequence()
    await books.end_periods(Retention(None, None, None))
    await books.db.execute("SELECT FROM drop_period('log', 0)")
    await books.db.execute(
        "DELETE FROM batch WHERE batch < (SELECT min(number) * 100000000000 FROM period"
        "                                   WHERE kind = 'log' AND dropped_at IS NULL)"
    )
    await books.assert_agree()


async def no_index_entry(books: Books) -> None:
    """Only a count of the table itself sees an event without an entry of the index."""
    await sequence_events(books)
    await books.db.execute(
        "INSERT INTO outbox (type, payload) SELECT 'a.b', '{}' FROM generate_series(1, 1000)"
    )
    await books.db.execute("ANALYZE outbox")  # Else a small table may be read as a whole.
    await books.sequence()
    await books.db.execute(UNREADY.format(False))
    await books.publish(3)
    await books.db.execute(UNREADY.format(True))
    await books.publish(1)
    await books.sequence()
    assert "all there" in await books.verify()


@dataclass(frozen=True)
class Mutant:
    """A part of a function, by what it is replaced, and the scenario that finds that."""

    function: str
    was: str
    becomes: str
    scenario: Callable[[Books], Awaitable[None]]


MUTANTS = {
    "no counted dead ids": Mutant("expected_events", " - coalesce(e.dead, 0)", "", rollbacks),
    "dead ids not yet counted": Mutant(
        "expected_events", "b.batch > a.batch AND ", "false AND ", rollbacks
    ),
    "dead ids counted twice": Mutant("expected_events", "b.batch > a.batch AND ", "", rollbacks),
    "open gaps are expected": Mutant("expected_events", " - open_ids()", "", open_gap),
    "open gaps are counted": Mutant("account", " - open_ids()", "", open_gap),
    "young gaps are not open": Mutant(
        "open_ids", "SELECT young FROM", "SELECT '{}'::int8multirange FROM", open_gap
    ),
    "no last block": Mutant(
        "accounted_ids", "bounds.high + 1", "(bounds.high >> 20) << 20", last_block
    ),
    "without the last id": Mutant("accounted_ids", "bounds.high + 1", "bounds.high", last_block),
    "blocks without their last id": Mutant(
        "block_ids", "((block + 1) << 20)", "((block + 1) << 20) - 1", border
    ),
    "blocks with the next one's first id": Mutant(
        "block_ids", "((block + 1) << 20)", "((block + 1) << 20) + 1", border
    ),
    "id 0 is expected": Mutant(
        "expected_events", "int8range(1, NULL)", "int8range(0, NULL)", rollbacks
    ),
    "voids are expected": Mutant(
        "expected_events", "FROM event_void v)", "FROM event_void v WHERE false)", leap
    ),
    "voids in blocks, too": Mutant("count_dead_ids", "<= 1 << 30\n", "> 0\n", leap),
    "no recount at resequence": Mutant(
        "discount_dead_ids", "dead = e.dead - counted.dead", "dead = e.dead", sequenced_after_all
    ),
    "a log is dropped uncounted": Mutant(
        "drop_period",
        "final_batch >= coalesce((SELECT a.batch FROM event_account a), 0)",
        "false",
        dropped_log,
    ),
}
REPRESENTATIVE = ("no counted dead ids", "open gaps are counted")


def _by_tier(name: str) -> object:
    return pytest.param(name, marks=[] if name in REPRESENTATIVE else [pytest.mark.full])


@pytest.mark.parametrize("name", [_by_tier(name) for name in MUTANTS])
async def test_a_mutant_of_the_accounts_is_found(name: str, books: Books) -> None:
    mutant = MUTANTS[name]
    (row,) = await books.db.fetch(FUNCTION, mutant.function)
    assert row[0].count(mutant.was) == 1, "it does not fit the function"
    await books.db.execute(row[0].replace(mutant.was, mutant.becomes))
    with pytest.raises(AssertionError):
        await mutant.scenario(books)


@pytest.mark.full
@pytest.mark.parametrize(
    "scenario",
    [*dict.fromkeys(mutant.scenario for mutant in MUTANTS.values()), no_index_entry],
    ids=lambda scenario: scenario.__name__,
)
async def test_the_accounts_pass(
    scenario: Callable[[Books], Awaitable[None]], books: Books
) -> None:
    await scenario(books)


async def test_a_count_by_the_index_finds_no_event_without_an_entry(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_table = "coalesce(s.events, 0) <> a.expected OR "
    by_index = [replace(check, query=check.query.replace(of_table, "")) for check in audit.CHECKS]
    assert sum(of_table in check.query for check in audit.CHECKS) == 1
    monkeypatch.setattr(audit, "CHECKS", by_index)
    with pytest.raises(AssertionError):
        await no_index_entry(books)
