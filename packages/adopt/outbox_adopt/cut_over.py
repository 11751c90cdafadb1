"""`outbox adopt cut-over`: the relay delivers what is pending, and everything new."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outbox.core.model.sql_names import quote_ident
from outbox.core.model.text import count
from outbox.errors import CannotRun, Conflict, UsageError
from outbox.store.connection.connect import map_errors
from outbox_adopt.adoption import (
    PLAN_BY_HASH,
    Adoption,
    add_to_journal,
    count_states,
    require_adoption,
    require_phase,
    send_message,
    set_phase,
)
from outbox_adopt.plan import plan_adoption

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox_adopt.plan import AdoptionPlan

Poller = Literal["stopped", "locks-rows", "marks-later"]
"""How the old poller is known not to send a row that is held: it was stopped; it locks rows with
FOR UPDATE until it has marked or deleted them; or it marks rows some time after it has sent
them, without the condition that they are still pending."""

BATCH_ROWS = 2_000
"""Held rows that one message publishes."""
LAST_ROWS = 500
"""Held rows that the message publishes for which the application waits."""
ROUNDS_MAX = 100
CUT_OVER_POLL_S = 0.2

# Rows that were published, or not, from the ledger; the trigger publishes others meanwhile.
COUNT_MOVED = """
SELECT state, count(*) FROM adopted_row
 WHERE adoption = $1 AND (was_held OR state = 'sent') GROUP BY state
"""


@dataclass(frozen=True, slots=True)
class CutOver:
    """A cut-over, or what it would do."""

    table: str
    dry_run: bool
    plan: AdoptionPlan
    published: int
    """Rows whose events were published, or would be."""
    duplicates: int
    sent: int
    """Rows that the old poller reported as sent while they were held."""
    rejected: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a cut-over is."""

    step: Literal["holding", "settling", "publishing", "waiting for the old poller"]
    done: float
    total: float


async def cut_over(
    connection: Connection[Any],
    schema: str,
    table: str,
    *,
    actor: str,
    poller: Poller | None,
    settle_s: float,
    wait_s: float,
    accept_rejected: bool = False,
    accept_unmatched: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> CutOver:
    """Publish what is pending, in the old table's order, and then everything new.

    It can be run again: after an interruption it goes on, and afterwards it publishes rejected
    rows that were corrected.

    Args:
        poller: why the old poller does not send a held row; None for a table whose rows a
            connector sends.
        settle_s: an upper bound of the time between its read and its mark, for `marks-later`.
        wait_s: maximum wait for rows that the old poller has locked.
        accept_rejected: leave rows of which no event can be made to the old outbox.
        accept_unmatched: publish events that no endpoint gets.
        dry_run: change nothing.

    Raises:
        Conflict: something must be accepted, or the adoption is in another phase.
        UsageError: this poller does not fit the table.
        CannotRun: rows are still locked after `wait_s`, or a lock was not granted.
        NotFound, SchemaMissing, DatabaseUnavailable: as in `require_adoption`.
    """
    with map_errors(schema, "operator"):
        adoption = await require_adoption(connection, schema, table, "dual_run", "held", "cut_over")
        mapping = adoption.sql.mapping
        if poller is None and mapping.publication is None:
            raise UsageError(
                "poller: say what keeps the old poller from sending held rows, too: stopped, "
                "locks-rows or marks-later"
            )
        if poller == "marks-later" and mapping.sent_column is None:
            raise UsageError(
                "poller: a deletion does not show when a row was read; use stopped or locks-rows"
            )
        plan = await plan_adoption(connection, schema, table, mapping)
        before = dict(await connection.fetch(COUNT_MOVED, adoption.id))
        if not dry_run:
            _require_accepted(plan, rejected=accept_rejected, unmatched=accept_unmatched)
            if mapping.publication is not None:
                await _switch_publication(connection, schema, adoption, actor)
            else:
                run = _Run(
                    connection, schema, adoption, actor, on_progress, poller == "marks-later"
                )
                await run.hold()
                if poller == "marks-later":
                    await run.settle(settle_s)
                await run.publish(wait_s)
        after = dict(await connection.fetch(COUNT_MOVED, adoption.id))
        states = await count_states(connection, adoption)
    new = {state: after.get(state, 0) - before.get(state, 0) for state in after}
    return CutOver(
        table=adoption.table,
        dry_run=dry_run,
        plan=plan,
        published=new.get("published", 0),
        duplicates=new.get("duplicate", 0),
        sent=new.get("sent", 0),
        rejected=plan.rejected if dry_run or mapping.publication else states.get("rejected", 0),
    )


def _require_accepted(plan: AdoptionPlan, *, rejected: bool, unmatched: bool) -> None:
    if plan.pending is not None and plan.faults and not rejected:
        fault = plan.faults[0]
        raise Conflict(
            f"{count(plan.rejected, 'pending row')} would be rejected, such as {fault.ids[0]}: "
            f"{fault.fault}; correct them, or leave them pending with --accept-rejected"
        )
    if plan.unmatched and not unmatched:
        raise Conflict(
            f"no endpoint subscribes to {plan.unmatched[0]}: add one, "
            "or publish such events all the same with --accept-unmatched"
        )


async def _switch_publication(
    connection: Connection[Any], schema: str, adoption: Adoption, actor: str
) -> None:
    """The connector gets the rows before this transaction, the relay those after it."""
    sql = adoption.sql
    if adoption.phase == "cut_over":
        return
    assert sql.mapping.publication is not None
    await send_message(
        connection,
        schema,
        [
            require_phase(sql, "dual_run"),
            *sql.trigger_statements("cut_over"),
            f"ALTER PUBLICATION {quote_ident(sql.mapping.publication)} "
            f"DROP TABLE {sql.source.name}",
            set_phase(adoption.id, "cut_over", "cut_over_at"),
            add_to_journal("adoption_cut_over", actor, {"table": sql.source.name}),
        ],
        "nothing is cut over",
    )


class _Run:
    """The steps of a cut-over of a table that shows what is pending."""

    def __init__(
        self,
        connection: Connection[Any],
        schema: str,
        adoption: Adoption,
        actor: str,
        on_progress: Callable[[Progress], None],
        marks_later: bool,
    ) -> None:
        self._db = connection
        self._marks_later = marks_later
        self._schema = schema
        self._adoption = adoption
        self._sql = adoption.sql
        self._actor = actor
        self._on_progress = on_progress
        self._clock = asyncio.get_running_loop().time

    async def hold(self) -> None:
        """Hold the pending rows; from the dual run, the trigger holds new ones from now on."""
        adoption = self._adoption
        if adoption.phase == "dual_run":
            await self._send(
                [
                    require_phase(self._sql, "dual_run"),
                    *self._sql.trigger_statements("held", marks_later=self._marks_later),
                    set_phase(adoption.id, "held", "held_at"),
                ]
            )
        await self._hold_pending()

    async def _hold_pending(self) -> None:
        """Hold all pending rows that are not locked, in batches from the last one on."""
        statement, total = self._sql.hold_pending(), await self._count_pending()
        first = first_id = None
        done = 0
        while row := await self._db.fetchrow(statement, first, first_id, BATCH_ROWS):
            first, first_id = row["first"], row["first_id"]
            done += row["rows"]
            self._on_progress(Progress("holding", done, max(total, done)))

    async def settle(self, settle_s: float) -> None:
        """Wait while the old poller marks rows that it had read."""
        began = self._clock()
        while (passed := self._clock() - began) < settle_s:
            self._on_progress(Progress("settling", passed, settle_s))
            await asyncio.sleep(min(CUT_OVER_POLL_S, settle_s - passed))

    async def publish(self, wait_s: float) -> None:
        """Publish the held rows in batches, and the last ones with the trigger's replacement."""
        await self._hold_locked(self._clock() + wait_s)
        if self._sql.mapping.once is not None and self._sql.mapping.sent_column is not None:
            # The ledger grew since its statistics were made: a nested loop would be quadratic.
            await self._send([PLAN_BY_HASH, self._sql.skip_duplicates()])
        total = done = 0
        for _ in range(ROUNDS_MAX):
            ids = [row[0] for row in await self._db.fetch(self._sql.held_ids())]
            total = max(total, done + len(ids))
            if len(ids) <= LAST_ROWS:
                return await self._finish()
            for n in range(0, len(ids), BATCH_ROWS):
                batch = ids[n : n + BATCH_ROWS]
                await self._db.execute(self._sql.publish_held(), batch)
                done += len(batch)
                self._on_progress(Progress("publishing", done, total))
            await self._hold_locked(self._clock() + wait_s)
        raise CannotRun("rows are written faster than they are published; run it again")

    async def _hold_locked(self, deadline: float) -> None:
        """Wait for rows that the old poller has locked; hold those that it does not send."""
        await self._hold_pending()
        while left := await self._count_pending():
            self._on_progress(Progress("waiting for the old poller", 0, left))
            if self._clock() >= deadline:
                raise CannotRun(
                    f"{count(left, 'pending row')} {'is' if left == 1 else 'are'} still locked; "
                    "the other ones are held: run cut-over again, or undo"
                )
            await asyncio.sleep(CUT_OVER_POLL_S)
            await self._hold_pending()

    async def _count_pending(self) -> int:
        """The pending rows that are not rejected."""
        rows: int = await self._db.fetchval(f"SELECT count(*) FROM ({self._sql.unhandled()}) u")
        return rows

    async def _finish(self) -> None:
        """Publish the last held rows, and replace the trigger.

        No row is pending by now: the trigger hides each one that would be.
        """
        sql, table = self._sql, self._sql.source.name
        await self._send(
            [
                require_phase(sql, "held", "cut_over"),
                *sql.trigger_statements("cut_over", marks_later=self._marks_later),
                sql.publish_all_held(),
                set_phase(sql.adoption, "cut_over", "cut_over_at"),
                add_to_journal("adoption_cut_over", self._actor, {"table": table}),
            ]
        )

    async def _send(self, statements: list[str]) -> None:
        await send_message(self._db, self._schema, statements, "the cut-over is not complete")
