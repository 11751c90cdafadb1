"""A relay whose connections fall silent for good after a certain message, beside another relay.

A proxy forwards the messages of the relay until that one, and afterwards nothing in either
direction, while it keeps all connections open: as with a frozen machine or a cut line.  The other
relay has direct connections and must take over.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.relay import (
    BUSY,
    LAPSE,
    OK,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    relay,
)
from tests.support.tcp import Lines, listening
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.model.response import AttemptResult
    from outbox.relay.relay import Relay
    from tests.support.pgbouncer import PgBouncer
    from tests.support.postgres import Database

LEASE_S = 2.0
DRAIN_S = 1.0
_SETTINGS: dict[str, Any] = {"lease_s": LEASE_S, "drain_s": DRAIN_S, "poll_s": 0.5}
_ENDPOINTS = 5
_NAME, OTHER = "silent", "other"
_PROBE_S = 0.1
"""The least time between two events that are published while the relay is silent."""
_PATIENCE_S = 60
START, WORK, STOP = PHASES = ("start", "work", "stop")
"""The phases of a relay's life; the messages of each are counted from 1."""

_RENEWALS = "SELECT renewals FROM replica WHERE name = $1"
_LEADS = "SELECT EXISTS (SELECT FROM cursor JOIN replica r ON r.id = writer WHERE r.name = $1)"
_OWNED = """
SELECT e.name, o.epoch FROM ownership o
  JOIN replica r ON r.id = replica_id JOIN endpoint e ON e.id = o.endpoint_id WHERE r.name = $1
"""
_IS_ALONE = "SELECT count(*) = 1 FROM replica"
_DESCRIBE = """
SELECT jsonb_pretty(jsonb_build_object(
    'now', clock_timestamp(),
    'cursor', (SELECT jsonb_agg(c) FROM cursor c),
    'replicas', (SELECT jsonb_agg(r) FROM replica r),
    'ownership', (SELECT jsonb_agg(o) FROM ownership o),
    'sessions', (
        SELECT jsonb_agg(jsonb_build_object(
                   'pid', pid, 'name', application_name, 'state', state, 'wait', wait_event,
                   'since', state_change, 'xid', backend_xid, 'blocked_by', pg_blocking_pids(pid),
                   'query', left(query, 100)))
          FROM pg_stat_activity
         WHERE datname = current_database() AND state <> 'idle' AND pid <> pg_backend_pid())))
"""
_IS_SEQUENCED = """
SELECT EXISTS (SELECT FROM delivery JOIN outbox o ON o.id = outbox_id WHERE payload = $1::jsonb)
"""


@dataclass(frozen=True)
class Silence:
    """Where a relay's connections fall silent."""

    leads: bool
    """Whether it is the first relay, which leads; otherwise it joins the other one."""
    phase: str
    n: int
    """The number of the message in its phase."""
    executed: bool
    """Whether the server gets that message."""
    all_connections: bool
    """Whether all connections fall silent, and new ones; otherwise that of the message."""


@dataclass(frozen=True)
class Recovery:
    """What followed a silence; times in seconds."""

    silence: Silence
    sequenced_s: float
    """From the silence until an event that was published then was sequenced."""
    delivered_s: float
    """From the silence until that event had arrived everywhere."""
    others_s: float
    """The longest delay of an event for an endpoint that the other relay owned all the time."""


class SilentLines(Lines):
    """A proxy for one relay, whose connections fall silent at a message."""

    def __init__(self, socket_path: str, silence: Silence | None) -> None:
        super().__init__(socket_path)
        self.by_message = True
        self.forward_last_data = silence is not None and silence.executed
        self.phase = START
        self.messages = Counter[str]()
        """The number of messages, by phase."""
        self.text = bytearray()
        """The messages, if none of them is the last."""
        self.silent_since: float | None = None
        self._silence = silence

    def stop_at(self, data: bytes) -> bool:
        self.messages[self.phase] += 1
        silence = self._silence
        if silence is None:
            self.text += data
            return False
        here = (self.phase, self.messages[self.phase])
        if here != (silence.phase, silence.n) or self.silent_since is not None:
            return False
        if silence.all_connections:
            self.hang()
        self.silent_since = _now()
        return True


class Stage:
    """A database on which relays live one after the other, beside another one.

    Args:
        leads: whether they start before the other one, and lead; otherwise the other one runs
            all the time.
        proxy: leads the relays to the database; the other relay is connected directly.
    """

    def __init__(self, database: Database, *, leads: bool, proxy: PgBouncer | None = None) -> None:
        self.database = database
        self.leads = leads
        self._pooled = proxy is not None
        server = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")
        self._socket_path = server if proxy is None else proxy.socket_path
        self._network = Network(self._respond)
        self._published_at: list[float] = []
        self._arrived_at: dict[int, dict[str, float]] = defaultdict(dict)
        self._other: Relay | None = None
        self._other_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Add the endpoints."""
        for n in range(_ENDPOINTS):
            await add_endpoint(self.database, f"e{n}", lanes=1)
        if not self.leads:
            await self.start_other()
            await until(self.other_owns_all, _PATIENCE_S, "the other relay")

    async def start_other(self) -> None:
        if self._other is None:
            self._other = relay(self.database, self._network, name=OTHER, **_SETTINGS)
            self._other_task = asyncio.create_task(self._other.run())

    async def stop_other(self) -> None:
        if self._other is not None and self._other_task is not None:
            self._other.stop()
            await self._other_task
            self._other = None

    async def run(self, silence: Silence | None) -> tuple[SilentLines, Recovery | None]:
        """The life of a relay; there is no recovery if it ended before it was silent."""
        lines = SilentLines(self._socket_path, silence)
        async with listening(lines.handler) as port:
            dsn = f"postgresql://postgres@127.0.0.1:{port}/{self.database.name}?sslmode=disable"
            settings = _SETTINGS | {"dsn": dsn, "pooled": self._pooled}
            worker = relay(self.database, self._network, name=_NAME, **settings)
            task = asyncio.create_task(worker.run())
            try:
                recovery = await self._observe(worker, task, lines, silence)
            except AssertionError as error:
                error.add_note(await self._describe())
                raise
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await fetchval(self.database, LAPSE, _NAME)
            is_alone = lambda: fetchval(self.database, _IS_ALONE)  # noqa: E731
            await until(is_alone, _PATIENCE_S, "the silent relay to be expired")
            await until(self.other_owns_all, _PATIENCE_S, "the other relay to take over")
        await self._check()
        if self.leads:
            await self.stop_other()
        return lines, recovery

    async def _describe(self) -> str:
        """The state of the cluster, and the sessions that are not idle."""
        return str(await fetchval(self.database, _DESCRIBE))

    async def _observe(
        self, worker: Relay, task: asyncio.Task[None], lines: SilentLines, silence: Silence | None
    ) -> Recovery | None:
        try:
            await self._live(worker, task, lines)
        except _SilentError:
            assert silence is not None
            assert lines.silent_since is not None
            return await self._recover(silence, lines.silent_since)
        return None

    async def _live(self, worker: Relay, task: asyncio.Task[None], lines: SilentLines) -> None:
        async def see(condition: Callable[[], Any], what: str) -> None:
            async def is_seen() -> Any:
                if lines.silent_since is not None:
                    raise _SilentError
                if task.done():
                    task.result()
                seen = condition()
                return await seen if inspect.isawaitable(seen) else seen

            await until(is_seen, _PATIENCE_S, what)

        async def deliver() -> None:
            n = await self._publish()
            await see(lambda: self._has_arrived(n), "an event to arrive")

        async def renewals() -> int:
            return await fetchval(self.database, _RENEWALS, _NAME) or 0

        async def is_renewed() -> bool:
            return await renewals() > before

        if self.leads:
            await see(lambda: fetchval(self.database, _LEADS, _NAME), "it to lead")
            await see(lambda: self._owns_all(_NAME), "it to own everything")
        else:
            await see(lambda: self._owned(_NAME), "it to own something")
        lines.phase = WORK
        await deliver()
        if self.leads:
            await self.start_other()
            await see(lambda: self._owned(OTHER), "the other relay to own something")
        await self._publish()
        await deliver()
        before = await renewals()
        await see(is_renewed, "a renewal")
        await deliver()  # After a time in which there was nothing to do.
        lines.phase = STOP
        await self._publish()
        worker.stop()
        await see(task.done, "it to stop")

    async def _recover(self, silence: Silence, since: float) -> Recovery:
        before = await self._owned(OTHER)
        first = await self._publish()
        await self.start_other()
        sequenced_at: list[float] = []

        async def has_recovered() -> bool:
            if not sequenced_at and await fetchval(self.database, _IS_SEQUENCED, str(first)):
                sequenced_at.append(_now())
            if _now() - self._published_at[-1] > _PROBE_S:
                await self._publish()
            return bool(sequenced_at) and self._has_arrived(first)

        await until(has_recovered, _PATIENCE_S, "the events to go on")
        last = len(self._published_at) - 1
        await until(lambda: self._has_arrived(last), _PATIENCE_S, "the last event")
        after = await self._owned(OTHER)
        delays = [
            self._arrived_at[n][name] - self._published_at[n]
            for n in range(first, last + 1)
            for name in before.keys() & after.keys()
            if before[name] == after[name]
        ]
        delivered_at = max(self._arrived_at[first].values())
        return Recovery(
            silence, sequenced_at[0] - since, delivered_at - since, max(delays, default=0.0)
        )

    async def _check(self) -> None:
        """Nothing was lost, reordered, or sent with another number."""
        await all_ended(self.database)
        sent: dict[str, dict[int, int]] = defaultdict(dict)
        for each in self._network.accepted:
            event = each.body["data"]
            assert sent[each.lane].setdefault(each.seq, event) == event, (
                "a number changed its event"
            )
        expected = [(n + 1, n) for n in range(len(self._published_at))]
        for lane, numbers in sent.items():
            assert list(numbers.items()) == expected, f"lane {lane}: lost or reordered"
        assert len(sent) == _ENDPOINTS
        assert await exceptions(self.database) == {}

    async def _publish(self) -> int:
        n = len(self._published_at)
        self._published_at.append(_now())
        await publish(self.database, n)
        return n

    def _respond(self, sent: Sent) -> AttemptResult:
        n = sent.body["data"]
        if sent.attempt == 1 and n % 2 == 0:
            return BUSY
        self._arrived_at[n].setdefault(sent.url.rpartition("/")[2], _now())
        return OK

    def _has_arrived(self, n: int) -> bool:
        return len(self._arrived_at[n]) == _ENDPOINTS

    async def _owned(self, name: str) -> dict[str, int]:
        """The endpoints of a relay, with their epochs."""
        async with self.database.at_hand() as connection:
            return {row["name"]: row["epoch"] for row in await connection.fetch(_OWNED, name)}

    async def _owns_all(self, name: str) -> bool:
        return len(await self._owned(name)) == _ENDPOINTS

    async def other_owns_all(self) -> bool:
        return await self._owns_all(OTHER)


class _SilentError(Exception):
    """The relay is silent."""


def _now() -> float:
    return asyncio.get_running_loop().time()
