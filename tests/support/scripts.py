"""Scripted interleavings, each of which an incorrect cursor fails.

Each script ends with every producer's transaction ended; the sequencer then runs until it is idle.
Comments give the ids: every script starts with 1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support import cursor_variants as variants

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.sequencers import Variant
    from tests.support.stage import Stage

OLD_S = 1.5
"""The age at which a gap becomes old, in seconds."""

MANY_TABLES = """
DO $$ BEGIN FOR i IN 1..2000 LOOP EXECUTE format('{}', i); END LOOP; END $$;
"""


@dataclass(frozen=True)
class Script:
    """A script, and the variants that fail it, with the kind of violation."""

    play: Callable[[Stage], Awaitable[None]]
    fails: dict[str, tuple[Variant, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.play.__name__


async def a_lower_id_commits_later(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn()
    # No batch waits for the open transaction.
    await stage.expect_sequenced(2)
    await stage.turn()
    await slow.commit()


async def a_transaction_stays_open_for_minutes(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    for _ in range(5):
        await stage.turn()
        stage.pass_time(60)
    await stage.expect_old_gaps((1, 1))
    await quick.publish()  # 3
    await stage.turn()
    await stage.expect_sequenced(2, 3)
    await slow.commit()


async def an_id_is_taken_before_the_xid(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await quick.publish()
    own_id = await slow.take_id()
    await quick.publish()
    await stage.turn()
    await stage.turn()
    await slow.use_id(own_id)
    await slow.commit()


async def an_older_xid_writes_second(stage: Stage) -> None:
    early, quick = await stage.actors(2)
    await early.begin()
    await early.execute("SELECT pg_current_xact_id()")
    await quick.publish(v=1)
    await early.publish(v=2)
    await early.commit()


async def a_cut_batch_does_not_reach_a_gap(stage: Stage) -> None:
    one, two, quick = await stage.actors(3)
    await one.open()  # 1
    await one.publish()  # 2
    await quick.publish()  # 3
    await two.open()  # 4
    await quick.publish()  # 5
    await stage.turn()
    await one.commit()
    await two.commit()
    await stage.limit(2)
    await stage.turn(asleep_s=60)
    await stage.expect_sequenced(3, 5, 1, 2)


async def a_commit_comes_after_the_lock_of_the_cursor(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn()
    await stage.turn(asleep_s=60, holders=slow.commit)


async def a_commit_comes_before_the_write(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn(write=slow.commit)
    await stage.expect_sequenced(2)
    await stage.turn()
    await stage.expect_sequenced(2, 1)


async def a_commit_comes_between_the_holders_and_the_read(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn()
    await stage.turn(read=slow.commit)


async def a_commit_comes_between_the_read_and_the_holders(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn()
    await stage.turn(holders_after_read=slow.commit)


async def an_id_is_taken_between_the_holders_and_the_read(stage: Stage) -> None:
    other, slow, quick = await stage.actors(3)
    await other.open()  # 1: a gap, so that the holders are read before the events
    await quick.publish()  # 2
    await stage.turn()

    async def overtake() -> None:
        await slow.open()  # 3
        await quick.publish()  # 4

    await stage.turn(read=overtake)
    await stage.turn()
    await slow.commit()
    await other.commit()


async def an_old_gap_closes_while_it_is_left_out(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open(v=1)  # 1
    await quick.publish()  # 2
    await stage.turn()
    stage.pass_time(OLD_S)
    await stage.turn()
    await stage.expect_old_gaps((1, 1))

    async def overtake() -> None:
        await slow.commit()
        await quick.publish(v=2)  # 3

    await stage.turn(read=overtake)


async def rows_are_visible_before_the_lock_is_let_go(stage: Stage) -> None:
    """COMMIT PREPARED removes dropped tables between the two steps, which takes time."""
    slow, quick, ending = await stage.actors(3)
    await slow.execute(f"SET relay.notify = off; {MANY_TABLES.format('CREATE TABLE t%s ()')}")
    await slow.open(v=1)  # 1
    await slow.execute(MANY_TABLES.format("DROP TABLE t%s"))
    await slow.execute("PREPARE TRANSACTION 'slow'")
    await quick.publish()  # 2
    await stage.turn()
    stage.pass_time(OLD_S)
    await stage.turn()
    await stage.expect_old_gaps((1, 1))
    committing: list[asyncio.Task[str]] = []

    async def overtake() -> None:
        committing.append(asyncio.create_task(ending.execute("COMMIT PREPARED 'slow'")))
        while not await quick.fetchval("SELECT count(*) FROM relay.outbox WHERE id = 1"):
            pass
        await quick.publish(v=2)  # 3

    await stage.turn(read=overtake)
    await asyncio.gather(*committing)


async def a_gap_closes_before_its_holders_are_captured(stage: Stage) -> None:
    other, slow, quick = await stage.actors(3)
    await other.open()  # 1
    await slow.open(v=1)  # 2
    await quick.publish()  # 3
    stage.pass_time(OLD_S)
    # 1 and 2 are one gap; `slow` is not among the captured holders.
    await stage.turn(holders_after_read=slow.commit)
    await quick.publish(v=2)  # 4
    await stage.turn()
    await other.rollback()


async def an_old_gap_closes_after_everything_was_forgotten(stage: Stage) -> None:
    slow, other, quick = await stage.actors(3)
    await slow.open(v=1)  # 1
    await other.open()  # 2
    await quick.publish()  # 3
    await stage.turn()
    stage.pass_time(OLD_S)
    await stage.turn()
    await stage.expect_old_gaps((1, 2))
    stage.forget()
    await stage.turn(holders_after_read=slow.commit)
    await quick.publish(v=2)  # 4
    await stage.turn()
    await other.rollback()


async def the_last_holder_of_an_old_gap_ends_unseen(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn()
    stage.pass_time(OLD_S)
    await stage.turn()
    await stage.expect_old_gaps((1, 1))
    await slow.rollback()
    await stage.reconnect()


async def a_cut_batch_does_not_reach_an_old_gap(stage: Stage) -> None:
    first, early, slow, other, quick = await stage.actors(5)
    for one in (first, early):
        await one.open()  # 1, 3
        await one.publish()  # 2, 4
    await quick.publish()  # 5
    await slow.open(v=1)  # 6
    await other.open()  # 7
    await quick.publish()  # 8
    await stage.turn()
    stage.pass_time(OLD_S)
    await stage.turn()
    await stage.expect_old_gaps((1, 4), (6, 7))
    for one in (first, early, slow):
        await one.commit()
    await stage.limit(2)
    await stage.turn()
    await stage.turn()  # Only now the holders from before the read lack `slow`.
    await stage.expect_sequenced(5, 8, 1, 2, 3, 4)
    await quick.publish(v=2)  # 9
    await stage.limit(1000)
    await stage.turn()
    await other.rollback()


async def an_event_comes_late_into_an_old_gap_of_many(stage: Stage) -> None:
    """A gap is split, and the rest of it stays watched."""
    slow, quick = await stage.actors(2)
    other, another = await stage.actors(2)
    await other.open()  # 1
    await slow.open(v=1)  # 2
    await another.open()  # 3
    await quick.publish()  # 4
    await stage.turn()
    stage.pass_time(OLD_S)
    await stage.turn()
    await stage.expect_old_gaps((1, 3))
    await slow.commit()
    await stage.turn()
    await stage.expect_old_gaps((1, 1), (3, 3))
    await another.rollback()
    await stage.turn()
    # The transaction of id 3 is unknown, so the gap ends with the last of the holders.
    await stage.expect_old_gaps((1, 1), (3, 3))
    await other.commit()


async def a_batch_is_rolled_back(stage: Stage) -> None:
    """State from a batch that was rolled back must not be kept."""
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn()

    async def fail() -> None:
        raise ConnectionResetError

    await slow.commit()
    try:
        await stage.turn(holders_after_read=fail)
    except ConnectionResetError:
        await stage.reconnect()
    await stage.turn()
    await stage.expect_sequenced(2, 1)


async def a_commit_is_in_doubt(stage: Stage) -> None:
    """The batch is durable, but the sequencer got an error."""
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.publish()  # 2
    await stage.turn_in_doubt()
    await quick.publish()  # 3
    await slow.commit()
    await stage.turn()
    await stage.expect_sequenced(2, 1, 3)


async def a_leaders_commit_is_in_doubt(stage: Stage) -> None:
    """The same for a batch that did not lock the cursor row."""
    slow, quick = await stage.actors(2)
    await quick.publish()  # 1
    await stage.turn()
    await slow.open()  # 2
    await quick.publish()  # 3
    await stage.turn_in_doubt()
    await quick.publish()  # 4
    await slow.commit()
    await stage.turn()
    await stage.expect_sequenced(1, 3, 2, 4)


async def another_replica_sequences_before_the_write(stage: Stage) -> None:
    """A batch read by a former leader must not be written."""
    slow, quick = await stage.actors(2)
    await quick.publish()  # 1
    await stage.turn()
    await slow.open(v=1)  # 2
    await quick.publish()  # 3

    async def overtake() -> None:
        await slow.commit()
        await stage.turn_of_another()
        await quick.publish(v=2)  # 4

    await stage.turn(write=overtake)
    await stage.expect_sequenced(1, 2, 3, 4)


async def another_replica_sequences_in_between(stage: Stage) -> None:
    slow, quick, other = await stage.actors(3)
    await slow.open()  # 1
    await other.open()  # 2
    await quick.publish()  # 3
    await stage.turn()
    await slow.commit()
    await stage.turn_of_another()
    await stage.expect_sequenced(3, 1)
    await quick.publish()  # 4
    await other.commit()
    await stage.turn()
    await stage.expect_sequenced(3, 1, 2, 4)


async def ids_skip_millions(stage: Stage) -> None:
    slow, quick = await stage.actors(2)
    await slow.open()  # 1
    await quick.execute("SELECT setval('relay.outbox_id_seq', 50000000)")
    await quick.publish()  # 50,000,001
    await stage.turn()
    await slow.publish()
    await slow.commit()


async def a_prepared_transaction_outlives_a_crash(stage: Stage) -> None:
    prepared, quick = await stage.actors(2)
    await prepared.execute("SET relay.notify = off")
    await prepared.open()  # 1
    await prepared.execute("PREPARE TRANSACTION 'outlives'")
    await quick.publish()  # 2
    await stage.turn()
    await stage.crash()
    (quick,) = await stage.actors(1)
    await stage.turn()
    await stage.turn()
    await quick.publish()
    await stage.turn()
    await quick.execute("COMMIT PREPARED 'outlives'")


SCRIPTS = (
    Script(a_lower_id_commits_later, {
        "naive": (variants.NAIVE, "lost"),
        "holders of a fresh gap captured before the read": (variants.FRESH_BEFORE, "lost"),
    }),
    Script(a_transaction_stays_open_for_minutes, {
        "time-out": (variants.TIME_OUT, "lost"),
    }),
    Script(an_id_is_taken_before_the_xid, {
        "xmax at sighting": (variants.XMAX, "lost"),
    }),
    Script(an_older_xid_writes_second, {
        "xid8 horizon": (variants.HORIZON, "inverted"),
    }),
    Script(a_cut_batch_does_not_reach_a_gap, {
        "a full batch decides about every gap": (variants.FULL_BATCH, "lost"),
    }),
    Script(a_commit_comes_after_the_lock_of_the_cursor),
    Script(a_commit_comes_before_the_write),
    Script(a_commit_comes_between_the_holders_and_the_read),
    Script(a_commit_comes_between_the_read_and_the_holders, {
        "holders looked at after the read": (variants.PROOF_AFTER, "lost"),
    }),
    Script(an_id_is_taken_between_the_holders_and_the_read, {
        "holders of a fresh gap captured before the read": (variants.FRESH_BEFORE, "lost"),
    }),
    Script(an_old_gap_closes_while_it_is_left_out, {
        "old gaps left out unchecked": (variants.NO_RECHECK, "inverted"),
    }),
    Script(rows_are_visible_before_the_lock_is_let_go, {
        "old gaps left out while the lock is held": (variants.LOCK_RECHECK, "inverted"),
    }),
    Script(a_gap_closes_before_its_holders_are_captured, {
        "gaps made old too early": (variants.EARLY_MOVE, "inverted"),
    }),
    Script(an_old_gap_closes_after_everything_was_forgotten, {
        "holders of a known gap captured after the read": (variants.KNOWN_AFTER, "inverted"),
    }),
    Script(the_last_holder_of_an_old_gap_ends_unseen),
    Script(a_cut_batch_does_not_reach_an_old_gap, {
        "an unreached gap is taken for read": (variants.UNREACHED, "inverted"),
    }),
    Script(an_event_comes_late_into_an_old_gap_of_many),
    Script(a_batch_is_rolled_back),
    Script(a_commit_is_in_doubt),
    Script(a_leaders_commit_is_in_doubt),
    Script(another_replica_sequences_before_the_write, {
        "a batch is written by a replica that no longer leads": (variants.UNFENCED, "duplicated"),
    }),
    Script(another_replica_sequences_in_between),
    Script(ids_skip_millions),
)  # fmt: skip
