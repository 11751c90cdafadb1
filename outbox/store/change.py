"""Changes by operators: planned by reading, and written in one message.

A plan reads without a lock, and collects the statements that write.  They are sent as one
message (see `outbox.store.sql.message`), so an operator who hangs holds nothing.  The
message aborts if what the plan depends on has changed meanwhile: the routing version, or what one
of its own statements requires.  Then the plan is made again.

A connection that is lost leaves open whether the message was executed.  So the first journal
entry of a change has a request id, which is unique: on another connection, the entry shows that
the change was made, and otherwise the change is planned and sent again with the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from uuid import UUID, uuid4

import asyncpg
import orjson

from outbox.errors import CannotRun, DatabaseUnavailable, OutboxError
from outbox.store.channels import NOTIFY_ALL
from outbox.store.connection.connect import LOST_ERRORS, map_errors
from outbox.store.connection.row_security import stop_empty
from outbox.store.quotas import Additions
from outbox.store.routing_change import BEGIN_CHANGE_OF, NEXT_BATCH
from outbox.store.sql.message import WriteStatement, is_aborted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncpg import Connection

    from outbox.store.sql.message import WriteCall

_UNSETTLED = (
    asyncpg.InterfaceError,
    asyncpg.ReadOnlySQLTransactionError,
    CannotRun,
    DatabaseUnavailable,
)
"""Errors, besides a lost connection, after which it remains unknown whether a change was made."""

T = TypeVar("T")
R = TypeVar("R")

PLANS_MAX = 100
"""Maximum number of plans for one change, if others change the same things all the time."""
CONFLICTS_MAX = 10
"""Maximum number of plans whose writes violate a unique constraint."""
CHANGE_LOCK_TIMEOUT_S = 10.0
"""Maximum wait for each lock; all are held for milliseconds only."""
RESPONSE_S = 60.0
"""Maximum time for one plan and its message; then the connection counts as lost."""

# Whether a change is journalled.
IS_MADE = "SELECT EXISTS (SELECT FROM journal WHERE request = $1)"

# The same, the routing version, and whether there is a batch, after which a change can apply.
READ_BEGINNING = f"""
SELECT version, ({IS_MADE}) AS is_made, EXISTS (SELECT FROM batch) AS has_batch FROM cursor
"""  # noqa: S608 (constants only)

# The replay job that this message has added.
NEW_JOB = "currval('replay_job_id_seq')"

# Writes the journal entries of a change, in order; the first one has its request id.
# batch_as: the field that gets the batch from which the change applies.  with_job: whether `job`
# is added, the replay job that the message adds.
WRITE_ENTRIES = WriteStatement(
    "write_entries",
    f"""
INSERT INTO journal (kind, actor, endpoint_id, data, request)
SELECT e.kind, $2, e.endpoint_id,
       e.data || CASE WHEN e.batch_as IS NULL THEN '{{}}' ELSE jsonb_build_object(
                     e.batch_as, {NEXT_BATCH}) END
              || CASE WHEN e.with_job
                      THEN jsonb_build_object('job', {NEW_JOB}) ELSE '{{}}' END,
       CASE e.n WHEN 1 THEN $3::uuid END
  FROM ROWS FROM (jsonb_to_recordset($1::text::jsonb)
           AS (kind text, endpoint_id uuid, data jsonb, batch_as text, with_job boolean))
       WITH ORDINALITY AS e(kind, endpoint_id, data, batch_as, with_job, n)
 ORDER BY e.n
""",  # noqa: S608 (constants only)
)


class Change:
    """The statements of one plan.

    Args:
        connection: a connection for reading; nothing may be written or locked on it.
        actor: the actor in the journal.
        request: the request id.
        routing: see `make_change`; a plan may decide it.
    """

    def __init__(self, connection: Any, actor: str, request: UUID, *, routing: bool) -> None:
        self.db = connection
        self.actor = actor
        self.request = request
        self.routing = routing
        self.additions = Additions()
        """What the plan adds that tenants have quotas of."""
        self._early: list[WriteCall] = []
        self._calls: list[WriteCall] = []
        self._entries: list[dict[str, Any]] = []

    def write(self, statement: WriteStatement, *arguments: object) -> None:
        """Add a statement to the message."""
        self._calls.append((statement, *arguments))

    def write_early(self, statement: WriteStatement, *arguments: object) -> None:
        """Add a statement that is executed before the cursor row is locked.

        It must write only new rows, which nobody else can lock.
        """
        self._early.append((statement, *arguments))

    def journal(
        self,
        kind: str,
        endpoint_id: UUID | None,
        data: Mapping[str, Any],
        *,
        batch_as: str | None = None,
        with_job: bool = False,
    ) -> None:
        """Add a journal entry.  A plan without a journal entry changes nothing.

        Args:
            batch_as: the field of the entry that gets the first batch to which the change applies.
            with_job: add the field `job`, the id of the replay job that the change adds.
        """
        entry = {"kind": kind, "endpoint_id": endpoint_id, "data": data}
        self._entries.append({**entry, "batch_as": batch_as, "with_job": with_job})

    async def require_quotas(self) -> None:
        """Compare what the plan adds with the quotas of tenants; called after every plan.

        Raises:
            QuotaExceeded: a tenant would have more than its quota.
        """
        self._calls[:0] = await self.additions.require_quotas(self.db)

    def discard(self) -> None:
        """Forget the statements: nothing will be changed."""
        self._entries.clear()

    def message(self, version: int) -> list[WriteCall]:
        """The message, or nothing if there is nothing to change.

        Args:
            version: the routing version of the plan.
        """
        if not self._entries:
            return []
        calls = [*self._calls, (WRITE_ENTRIES, document(self._entries), self.actor, self.request)]
        if not self.routing:
            return [*self._early, *calls]
        return [*self._early, (BEGIN_CHANGE_OF, version), *calls, (NOTIFY_ALL,)]


def document(value: Any) -> str:
    """A JSON argument, with the rows that a statement writes."""
    return orjson.dumps(value, _plain, orjson.OPT_UTC_Z).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):  # A subclass, as asyncpg returns it.
        return str(value)
    raise TypeError


Plan: TypeAlias = Callable[[Change], Awaitable[T]]
"""Reads, adds statements to the change, and returns its result; it may be called again."""

ReadBack: TypeAlias = Callable[[Any, UUID, T], Awaitable[R]]
"""Reads what a change has written: with a connection, the request id and the plan's result."""


async def make_change(
    connection: Connection[Any],
    schema: str,
    actor: str,
    plan: Plan[T],
    *,
    routing: bool = True,
    long: bool = False,
) -> T:
    """Plan a change and write it; returns the result of the plan that was written.

    Args:
        actor: the actor in the journal.
        routing: the change concerns endpoints, subscriptions, lanes or replays: it applies from
            the next batch on, and is planned again if another one of these is made meanwhile.
        long: the plan may take longer than RESPONSE_S.

    Raises:
        CannotRun: a lock was not granted, or others make such changes all the time.
        CursorBroken: the table cursor or batch was emptied.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
        OutboxError: of the plan.
        asyncpg.PostgresError: the server rejects a value.
    """

    async def keep(_: Any, __: UUID, result: T) -> T:
        return result

    return await make_change_and_read(
        connection, schema, actor, plan, keep, routing=routing, long=long
    )


async def make_change_and_read(
    connection: Connection[Any],
    schema: str,
    actor: str,
    plan: Plan[T],
    read_back: ReadBack[T, R],
    *,
    routing: bool = True,
    long: bool = False,
) -> R:
    """Like `make_change`; returns what `read_back` reads afterwards."""
    execution = _Execution(plan, read_back, actor, routing=routing, long=long)
    # Read now: a pool's connection has no attributes any more when it is lost.
    reopen = connection.reopen
    with map_errors(schema, "operator"):
        try:
            return await execution.run(connection)
        except LOST_ERRORS:
            if not execution.sent or reopen is None:
                raise
        try:
            other = await reopen()
            try:
                return await execution.run(other)
            finally:
                other.terminate()
        except (*LOST_ERRORS, *_UNSETTLED) as error:
            raise DatabaseUnavailable(
                "the connection to the database was lost, and it is not known whether the change "
                "was made; check before you run it again"
            ) from error


class _Execution(Generic[T, R]):
    """Plans and sends a change until it is written."""

    def __init__(
        self, plan: Plan[T], read_back: ReadBack[T, R], actor: str, *, routing: bool, long: bool
    ) -> None:
        self._plan = plan
        self._read_back = read_back
        self._actor = actor
        self._routing = routing
        self._long = long
        self._request = uuid4()
        self._conflicts = 0
        self.sent: list[T] = []
        """The result of the plan whose message was, or may have been, executed; at most one."""

    async def run(self, connection: Any) -> R:
        for _ in range(PLANS_MAX):
            with nullcontext() if self._long else _limit_response(connection):
                version, is_made = await self._read_beginning(connection)
                if not is_made:
                    change = Change(connection, self._actor, self._request, routing=self._routing)
                    try:
                        result = await self._plan(change)
                        await change.require_quotas()
                    except OutboxError:
                        # It may be due to this change, which was executed meanwhile.
                        if not await self._is_made_meanwhile(connection):
                            raise
                        continue
                    calls = change.message(version)
                    if calls and not await self._send(connection, calls, result):
                        continue
                    if not calls:
                        if await self._is_made_meanwhile(connection):
                            continue
                        self.sent = [result]
                return await self._read_back(connection, self._request, self.sent[0])
        raise CannotRun("others change the same things all the time; run it again")

    async def _read_beginning(self, connection: Any) -> tuple[int, bool]:
        row = await connection.fetchrow(READ_BEGINNING, self._request)
        if row is None:
            await stop_empty(connection, "cursor")
        if not row["has_batch"]:
            await stop_empty(connection, "batch")
        return row["version"], row["is_made"]

    async def _is_made_meanwhile(self, connection: Any) -> bool:
        """Whether the message that may have been executed was executed while this was planned."""
        return bool(self.sent and await connection.fetchval(IS_MADE, self._request))

    async def _send(self, connection: Any, calls: Sequence[WriteCall], result: T) -> bool:
        """Send the message; returns False if the plan is outdated."""
        try:
            await connection.write_together(*calls, lock_timeout_s=CHANGE_LOCK_TIMEOUT_S)
        except LOST_ERRORS:
            self.sent.append(result)
            raise
        except asyncpg.LockNotAvailableError:
            raise CannotRun(
                f"another session holds a lock for over {CHANGE_LOCK_TIMEOUT_S:g} s; nothing was "
                "changed; see: outbox doctor"
            ) from None
        except asyncpg.DeadlockDetectedError:
            return False
        except asyncpg.UniqueViolationError:
            # Usually a name that was taken meanwhile, which the next plan finds.
            self._conflicts += 1
            if self._conflicts > CONFLICTS_MAX:
                raise
            return False
        except asyncpg.PostgresError as error:
            if is_aborted(error):
                return False
            raise
        self.sent = [result]
        return True


@contextmanager
def _limit_response(connection: Any) -> Iterator[None]:
    """Close the connection if the server does not respond: it counts as lost."""
    timer = asyncio.get_running_loop().call_later(RESPONSE_S, connection.terminate)
    try:
        yield
    finally:
        timer.cancel()
