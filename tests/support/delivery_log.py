"""A delivery log of any shape, written by SQL, and what a filter should find in it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import AttemptResult, Failure
from outbox.operations.deliveries.model import DeliveryFilter, StatusRange
from tests.support.relay import BUSY, OK, REFUSED

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from asyncpg import Connection

    from tests.support.relay import Sent

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC)
BATCHES_MAX = 40
SUCCESSES = (200, 204)
_TYPES = ("order.paid", "order.sent", "user.added")
_OFFSET_MAX = 32_767

_BATCH = "INSERT INTO batch (batch, high, at, lanes) VALUES ($1, $2, $3, $4)"
_EVENT = """
INSERT INTO outbox (id, type, tenant, key, payload) OVERRIDING SYSTEM VALUE
VALUES ($1, $2, $3, $4, '{}')
"""
_RUN = """
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets) VALUES ($1, $2, $3, $4, $5)
"""
_ATTEMPTS = """
INSERT INTO attempt_run (lane_id, batch, seq, replica_id, started_at, attempt, count, elapsed_ms,
                         status, outcome, starts_us, response)
VALUES ($1, $2, $3, 1, $4, $5, $6, 1, $7, $8::text::"char", $9, $10)
"""
_DEAD = """
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, event_id, type,
                         tenant, reason, attempts)
SELECT endpoint_id, id, $2, $3, $3, $4, gen_random_uuid(), $5, $6, $7, $8 FROM lane WHERE id = $1
"""
_PROGRESS = "UPDATE lane_progress SET acked_seq = $2 WHERE lane_id = $1"
_COUNTER = "UPDATE lane_counter SET last_seq = $2 WHERE lane_id = $1"


def becomes(sent: Sent) -> AttemptResult:
    """What a receiver answers, by the payload: `well`, `busy`, `late`, `bad` or `gone`."""
    match sent.body["data"]:
        case "busy" if sent.attempt == 1:
            return BUSY
        case "late" if sent.attempt == 1:
            return AttemptResult.failed(Failure.TIMEOUT, "", 15.0)
        case "bad":
            return REFUSED
        case "gone":
            return AttemptResult.failed(Failure.DNS, "no such name", 0.25)
    return OK


def at(batch: int) -> datetime:
    """When a batch was written."""
    return BEGAN + timedelta(seconds=batch)


@dataclass(frozen=True)
class Logged:
    """A delivery in the log."""

    batch: int
    outbox_id: int
    lane_id: int
    seq: int
    type: str
    tenant: str | None
    key: str
    statuses: tuple[int | None, ...]
    """Of its attempts; None: no response."""
    reason: str | None
    """Why it is a dead letter."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.batch, self.outbox_id, self.lane_id, self.seq

    @property
    def delivered(self) -> bool:
        return bool(self.statuses) and self.statuses[-1] in SUCCESSES

    @property
    def outcome(self) -> str:
        return "delivered" if self.delivered else "dead" if self.reason else "pending"

    def meets(self, only: DeliveryFilter) -> bool:
        """The conditions of a filter, each by its definition."""
        since, until = only.since, only.until
        assert not isinstance(since, timedelta)
        assert not isinstance(until, timedelta)
        conditions = (
            not only.types or any(self._is_of_type(each) for each in only.types),
            only.tenant in (None, self.tenant),
            only.status is None or any(map(only.status.includes, self.statuses)),
            not only.failed or self.reason or set(self.statuses) - set(SUCCESSES),
            since is None or at(self.batch) >= since,
            until is None or at(self.batch) < until,
            only.outcome in (None, self.outcome, self.reason),
        )
        return all(conditions)

    def _is_of_type(self, pattern: str) -> bool:
        return self.type.startswith(pattern.removesuffix("*"))


def any_filter(rng: random.Random) -> DeliveryFilter:
    """A filter that finds something more often than not."""
    statuses = StatusRange(500, 599), StatusRange(200, 299), StatusRange(404, 404)
    return DeliveryFilter(
        types=rng.choice(((), (), ("order.*",), ("user.added",), ("order.paid", "user.added"))),
        outcome=rng.choice((None, None, "delivered", "pending", "dead", "refused", "expired")),
        failed=rng.random() < 0.3,
        status=rng.choice((None, None, *statuses)),
        since=rng.choice((None, None, at(rng.randint(0, BATCHES_MAX)))),
        until=rng.choice((None, None, at(rng.randint(BATCHES_MAX, 2 * BATCHES_MAX)))),
        tenant=rng.choice((None, None, "acme")),
    )


async def write_log(db: Connection[Any], rng: random.Random, lanes: Sequence[int]) -> list[Logged]:
    """Write batches of deliveries to some of the lanes, and what became of them.

    Returns:
        The log, the newest first.
    """
    log, rows = _deliveries(rng, lanes)
    log = sorted(_with_pending(log, rng), key=lambda each: each.place)
    for lane in lanes:
        made = [each for each in log if each.lane_id == lane]
        pending = [each.seq for each in made if each.outcome == "pending"]
        rows[_COUNTER].append((lane, len(made)))
        rows[_PROGRESS].append((lane, min(pending, default=len(made) + 1) - 1))
    for each in log:
        if each.reason is not None:
            place = each.lane_id, each.batch, each.seq, each.outbox_id
            about = each.type, each.tenant, each.reason, len(each.statuses)
            rows[_DEAD].append((*place, *about))
    rows[_ATTEMPTS] += _attempts(log, rng)
    await db.execute("UPDATE batch SET at = $1", at(0))
    for statement, arguments in rows.items():
        await db.executemany(statement, arguments)
    return log[::-1]


def _deliveries(
    rng: random.Random, lanes: Sequence[int]
) -> tuple[list[Logged], dict[str, list[tuple[Any, ...]]]]:
    log: list[Logged] = []
    rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    numbers = dict.fromkeys(lanes, 0)
    outbox_id = 0
    busy = rng.sample(list(lanes), rng.randint(1, len(lanes)))
    for batch in range(1, rng.randint(2, BATCHES_MAX)):
        events = []
        for _ in range(rng.choice((0, 1, 1, 2, 30))):
            outbox_id += rng.choice((1, 1, 1, _OFFSET_MAX + 1))
            about = rng.choice(_TYPES), rng.choice((None, "acme")), f"key-{rng.randint(1, 5)}"
            events.append((outbox_id, *about))
        rows[_EVENT] += events
        receiving = rng.sample(busy, rng.randint(1, len(busy)))
        rows[_BATCH].append((batch, outbox_id, at(batch), receiving))
        for lane in receiving:
            run: list[int] = []
            for id_, type_, tenant, key in events:
                numbers[lane] += 1
                place = batch, id_, lane, numbers[lane]
                log.append(Logged(*place, type_, tenant, key, *_becomes(rng)))
                if run and (id_ - run[0] > _OFFSET_MAX or len(run) == rng.choice((3, 256))):
                    rows[_RUN].append(_run(lane, batch, numbers[lane] - len(run), run))
                    run = []
                run.append(id_)
            if run:
                rows[_RUN].append(_run(lane, batch, numbers[lane] - len(run) + 1, run))
    return log, rows


def _run(lane: int, batch: int, seq: int, ids: Sequence[int]) -> tuple[Any, ...]:
    offsets = [id_ - ids[0] for id_ in ids] if len(ids) > 1 else None
    return lane, batch, seq, ids[0], offsets


def _becomes(rng: random.Random) -> tuple[tuple[int | None, ...], str | None]:
    """The statuses of the attempts of a delivery, and why it is a dead letter."""
    failures = rng.choice((0, 0, 0, 0, 1, 3))
    statuses = tuple(rng.choice((500, 503, 404, None)) for _ in range(failures))
    if rng.random() < 0.1:
        return statuses, rng.choice(("refused", "exhausted", "expired"))
    return (*statuses, rng.choice(SUCCESSES)), None


def _with_pending(log: Sequence[Logged], rng: random.Random) -> Iterator[Logged]:
    """The last deliveries of a lane are pending, and only the first of them has been sent."""
    last = {each.lane_id: each.seq for each in log}
    acked = {lane: rng.randint(max(0, seq - 5), seq) for lane, seq in last.items()}
    for each in log:
        if each.seq > acked[each.lane_id]:
            sent = each.seq == acked[each.lane_id] + 1
            statuses = (503,) * rng.randint(0, 2) if sent else ()
            yield replace(each, statuses=statuses, reason=None)
        else:
            yield each


def _attempts(log: Sequence[Logged], rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """Successes at the first attempt share a run where they may."""
    run: list[Logged] = []
    for each in sorted(log, key=lambda each: (each.lane_id, each.batch, each.seq)):
        if not run or not _continues(run[-1], each) or rng.random() < 0.1:
            if run:
                yield _successes(run)
            run = []
        if len(each.statuses) == 1 and each.delivered:
            run.append(each)
            continue
        for attempt, status in enumerate(each.statuses, 1):
            outcome = "d" if status in SUCCESSES else "r"
            response = '{"failure": "timeout"}' if status is None else None
            place = each.lane_id, each.batch, each.seq, at(each.batch)
            yield (*place, attempt, 1, status, outcome, None, response)
    if run:
        yield _successes(run)


def _continues(last: Logged, each: Logged) -> bool:
    follows = last.lane_id, last.batch, last.seq + 1, last.statuses
    return follows == (each.lane_id, each.batch, each.seq, each.statuses)


def _successes(run: Sequence[Logged]) -> tuple[Any, ...]:
    first = run[0]
    starts_us = list(range(len(run))) if len(run) > 1 else None
    place = first.lane_id, first.batch, first.seq, at(first.batch)
    return (*place, 1, len(run), first.statuses[0], "d", starts_us, None)
