"""Rows that the database refuses: a trigger, a constraint or a rule of the application's.

A message writes many rows, and one that is refused undoes all.  So its rows are then written in
halves, until the refused one is alone: it is postponed or left out, and the others are written.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

import orjson
from asyncpg import InsufficientPrivilegeError

from outbox.core.delivery.commands import DeadRange
from outbox.core.delivery.operational_events import ROW_REFUSED
from outbox.drivers.errors import condition_of
from outbox.store.connection.connect import not_granted
from outbox.store.connection.row_security import RowSecurityError
from outbox.store.operational_events import HAS_OPERATIONAL_SUBSCRIBER
from outbox.store.sql.message import WriteStatement, is_aborted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import PostgresError

    from outbox.core.delivery.commands import AttemptRow, ErasedEvent, Record
    from outbox.core.model.delivery import Delivery
    from outbox.store.sql.message import WriteCall

REPORT_AGAIN_S = 600.0
"""Minimum seconds between two operational events of a process about the same kind of row."""

ATTEMPT, DEAD_LETTER, PROGRESS = "attempt", "dead letter", "progress"
"""Kinds of rows of a lane."""

# The journal's entries about successes that are not in the attempt log.
IS_REFUSED_SUCCESS = f"""
    kind = 'row_refused' AND data ->> 'row' = '{ATTEMPT}' AND data ->> 'outcome' = 'delivered'"""

_ABOUT_THE_SESSION = ("25", "26", "XX")
"""Classes of errors that no row causes: the transaction's state, an unknown prepared statement, a
damaged index."""

# Reports a refused row.  The operational event has no endpoint, so tenants do not receive it, and
# not the database's message, which may quote a payload.
#   $1: the kind of the row.  $2: what identifies it.  $3, $4: reason and SQLSTATE.  $5: actor.
#   $6: whether to publish the event.
REPORT_REFUSED_ROW = WriteStatement(
    "report_refused_row",
    f"""
WITH journalled AS (
    INSERT INTO journal (kind, actor, data)
    VALUES ('row_refused', $5,
            jsonb_build_object('row', $1::text, 'reason', $3::text) || $2::jsonb))
SELECT publish_operational_event('{ROW_REFUSED}', NULL, jsonb_build_object(
           'row', $1::text, 'sqlstate', $4::text) || $2::jsonb)
 WHERE $6::boolean AND {HAS_OPERATIONAL_SUBSCRIBER}
   AND ($2::jsonb ->> 'lane' IS NULL OR contains_ordinary_event(
            ($2::jsonb ->> 'lane')::bigint, ($2::jsonb ->> 'batch')::bigint,
            ($2::jsonb ->> 'sequence')::bigint, ($2::jsonb ->> 'to_sequence')::bigint))
""",  # noqa: S608 (constants only)
)


class RefusedRow(NamedTuple):
    """A row that the database refused."""

    kind: str
    """`delayed event`, `schedule`, `attempt`, `dead letter` or `progress`."""
    identity: str
    """What identifies it, as a JSON object."""
    reason: str
    sqlstate: str
    publish: bool = True
    """Whether to publish an operational event."""

    @classmethod
    def of_lane(
        cls, kind: str, record: Record, reason: str, sqlstate: str, *, publish: bool
    ) -> RefusedRow:
        """The row of a record that is not written."""
        dead = record.dead
        if isinstance(dead, DeadRange):
            first: DeadRange | AttemptRow | Delivery | ErasedEvent = dead
        elif record.attempt is not None:
            first = record.attempt
        elif dead is not None:
            first = dead.delivery
        else:
            # What failed was not a delivery: a lane could not be opened or ended.
            assert record.progress is not None
            place = (record.lane_id, record.progress.floor_batch, record.seq, record.seq)
            return cls.of_sequences(kind, place, None, reason, sqlstate, publish=publish)
        outcome = record.attempt.outcome if record.attempt and kind == ATTEMPT else None
        place = (record.lane_id, first.batch, first.seq, record.seq)
        return cls.of_sequences(kind, place, outcome, reason, sqlstate, publish=publish)

    @classmethod
    def of_sequences(
        cls,
        kind: str,
        place: tuple[int, int, int, int],
        outcome: str | None,
        reason: str,
        sqlstate: str,
        *,
        publish: bool = True,
    ) -> RefusedRow:
        """Rows of some sequences of a lane.

        Args:
            place: lane, batch, the first and the last sequence.
            outcome: that of an attempt.
        """
        lane_id, batch, first, last = place
        identity: dict[str, object] = {
            "lane": lane_id,
            "batch": batch,
            "sequence": first,
            "to_sequence": last,
        }
        if outcome is not None:
            identity |= {"outcome": outcome}
        return cls(kind, orjson.dumps(identity).decode(), reason, sqlstate, publish)

    def report(self, actor: str) -> WriteCall:
        """The call that reports it."""
        return (REPORT_REFUSED_ROW, *self[:4], actor, self.publish)


class RefusedRowReports:
    """Limits operational events to one in `REPORT_AGAIN_S` for each kind of row; steady clock."""

    def __init__(self) -> None:
        self._due_at: dict[str, float] = {}

    def is_due(self, kind: str, now: float) -> bool:
        """Whether an event about this kind of row may be published."""
        return now >= self._due_at.get(kind, -inf)

    def record(self, kind: str, now: float) -> None:
        """Record that one was published."""
        self._due_at[kind] = now + REPORT_AGAIN_S

    def report(
        self,
        kind: str,
        identity: Mapping[str, object],
        reason: str,
        sqlstate: str,
        *,
        actor: str,
        now: float,
    ) -> WriteCall:
        """The call that reports a row, with the operational event if one may be published."""
        publish = self.is_due(kind, now)
        if publish:
            self.record(kind, now)
        row = RefusedRow(kind, orjson.dumps(identity).decode(), reason, sqlstate, publish)
        return row.report(actor)


def is_refused(error: PostgresError) -> bool:
    """Whether an error may be about a row, and not about the session, the server or a lock."""
    return (
        condition_of(error) is None
        and not is_aborted(error)
        and not isinstance(error, RowSecurityError)
        and error.sqlstate[:2] not in _ABOUT_THE_SESSION
    )


def reason_of(error: PostgresError) -> str:
    """The first line of the database's message, and the command that grants a missing privilege."""
    # An error with a context is one of a function or trigger, where the privilege may be the
    # application's.
    if isinstance(error, InsufficientPrivilegeError) and not error.context:
        return not_granted(error, "relay")
    return str(error).partition("\n")[0]
