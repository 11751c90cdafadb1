"""Replays of dead letters, requested by operators."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from outbox.errors import Conflict, NotFound
from outbox.operations.dead_letter_filter import DeadLetterFilter
from outbox.operations.replays import ReplayOutcome
from outbox.store.connection.connect import map_errors
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.stores.routing_change import request_transaction, routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.sequencing.gaps import Range
    from outbox.operations.dead_letter_filter import DeadLetterSelection
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

UNAVAILABLE = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}
"""Why dead letters of endpoints in these states cannot be replayed."""


class PartRange(NamedTuple):
    """The part of a new job for one endpoint."""

    endpoint_id: UUID
    first_id: int
    last_id: int
    expected: int | None = None
    from_id: int | None = None


class ReplayCandidates(NamedTuple):
    """The dead letters of an endpoint."""

    part: PartRange
    endpoint: str
    dead_letters: int
    reason: str | None = None
    """Why they cannot be replayed; None: they can."""


async def start_replay(
    connection: Connection,
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    rate_per_s: float | None = None,
) -> ReplayOutcome:
    if selection.ids:
        async with routing_transaction(connection, schema):
            rows = await lock_named(connection, selection.ids, again=True)
            found = _by_endpoint(rows)
            ids = [row["id"] for row in rows]
            job = await _add_job(connection, selection, found, rate_per_s, actor)
            await connection.call(add_replays, job, ids)
            await set_dead_letter_state(connection, ids, "replaying")
            await write_journal(connection, "dead_replayed", actor, None, {"job": job})
        return _outcome(found, job)
    with map_errors(schema, "operator"):
        if selection.filter != DeadLetterFilter():
            raise NotImplementedError("a sweep of the simulation is of all dead letters")
        found = await connection.call(count_dead)
    some = [each for each in found if each.reason is None]
    if not some:
        return _outcome(found, None)
    async with request_transaction(connection, schema):
        job = await _add_job(connection, selection, some, rate_per_s, actor)
        await write_journal(connection, "dead_replayed", actor, None, {"job": job})
    return _outcome(found, job)


async def set_dead_letter_state(connection: Connection, ids: Sequence[int], state: str) -> None:
    await connection.call(write_dead_letter_state, ids, state)
    await connection.call(unblock, ids)


async def lock_named(connection: Connection, ids: Sequence[int], *, again: bool) -> list[Row]:
    """The dead letters with these ids, locked.

    Args:
        again: require that their endpoints can be sent replays.

    Raises:
        NotFound, Conflict: as in the real store.
    """
    rows = await connection.call(lock_dead, sorted(set(ids)))
    if missing := set(ids) - {row["id"] for row in rows}:
        raise NotFound(f"there is no dead letter {min(missing)}")
    for row in rows:
        if row["state"] == "replaying":
            await connection.call(read_last_replay)
        if row["state"] != "dead":
            raise Conflict(f"dead letter {row['id']} is {row['state']}")
        if again and row["endpoint_state"] in UNAVAILABLE:
            raise Conflict(f"the endpoint of dead letter {row['id']} is {row['endpoint_state']}")
    return rows


def _by_endpoint(rows: Sequence[Row]) -> list[ReplayCandidates]:
    found: dict[UUID, ReplayCandidates] = {}
    for row in rows:
        i = row["endpoint_id"]
        previous = found.get(i)
        dead_letters, sequences = (
            (previous.dead_letters, previous.part.expected or 0) if previous else (0, 0)
        )
        part = PartRange(i, 1, 0, sequences + row["to_seq"] - row["seq"] + 1)
        found[i] = ReplayCandidates(part, row["endpoint"], dead_letters + 1)
    return list(found.values())


async def _add_job(
    connection: Connection,
    selection: DeadLetterSelection,
    found: Sequence[ReplayCandidates],
    rate_per_s: float | None,
    actor: str,
) -> int:
    job = await connection.call(
        add_job, "dead", selection.filter.endpoint, actor, rate_per_s=rate_per_s
    )
    # Named dead letters have their replays already.
    last_of = {each.part: 0 if selection.ids else each.part.last_id for each in found}
    parts = [part._replace(last_id=last_id) for part, last_id in last_of.items()]
    await connection.call(add_parts, job, parts)
    return job


def _outcome(found: Sequence[ReplayCandidates], job: int | None) -> ReplayOutcome:
    skipped: Counter[str] = Counter()
    for each in found:
        if each.reason is not None:
            skipped[each.reason] += each.dead_letters
    dead_letters = {each.endpoint: each.dead_letters for each in found if each.reason is None}
    return ReplayOutcome(sum(dead_letters.values()), dict(skipped), job, dead_letters)


# --------------------------------------------------------------------- its jobs


def count_dead(db: Database, tx: Transaction) -> list[ReplayCandidates]:
    found: dict[UUID, list[Row]] = {}
    for d in tx.rows(db.dead_letter):
        if d["state"] == "dead":
            found.setdefault(d["endpoint_id"], []).append(d)
    rows = []
    for endpoint_id, dead_letters in found.items():
        e = tx.get(db.endpoint, endpoint_id)
        assert e is not None
        ids = [d["id"] for d in dead_letters]
        sequences = sum(d["to_seq"] - d["seq"] + 1 for d in dead_letters)
        part = PartRange(endpoint_id, min(ids), max(ids), sequences)
        rows.append(
            ReplayCandidates(part, e["name"], len(dead_letters), UNAVAILABLE.get(e["state"]))
        )
    return sorted(rows, key=lambda row: row.endpoint)


def add_job(
    db: Database,
    tx: Transaction,
    kind: str,
    endpoint: str | None,
    requested_by: str,
    *,
    rate_per_s: float | None = None,
    since: datetime | None = None,
    gaps: Sequence[Range] = (),
    lane_id: int | None = None,
) -> int:
    new = db.serial(db.replay_job)
    row = {
        "id": new,
        "kind": kind,
        "endpoint": endpoint,
        "requested_by": requested_by,
        "since": since,
    }
    row |= {"gaps": gaps, "lane_id": lane_id, "rate_per_s": rate_per_s}
    tx.put(db.replay_job, new, {**row, "state": "running", "ended_at": None})
    return new


def add_parts(db: Database, tx: Transaction, job_id: int, parts: Sequence[PartRange]) -> None:
    for part in parts:
        row = {**part._asdict(), "job_id": job_id, "next_id": part.first_id}
        row |= {"taken": 0, "erased": 0, "batch": None, "ended_at": None, "end_reason": None}
        tx.put(db.replay_job_endpoint, (job_id, part.endpoint_id), row)


def add_replays(db: Database, tx: Transaction, job_id: int, ids: Sequence[int]) -> None:
    for dead_id in sorted(ids):
        dead_letter = tx.get(db.dead_letter, dead_id)
        assert dead_letter is not None
        add_replay(db, tx, job_id, dead_letter)


def add_replay(db: Database, tx: Transaction, job_id: int, dead_letter: Row) -> None:
    new = db.serial(db.replay)
    place = {
        "next_seq": dead_letter["seq"],
        "next_batch": dead_letter["batch"],
        "to_seq": dead_letter["to_seq"],
    }
    of = {"job_id": job_id, "endpoint_id": dead_letter["endpoint_id"], "dead_id": dead_letter["id"]}
    tx.put(db.replay, new, {"id": new, **of, **place})


# ------------------------------------------------------------- the dead letters


def lock_dead(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[list[Row]]:
    found = []
    for dead_id in ids:
        if tx.get(db.dead_letter, dead_id) is None:
            continue
        yield Wait(db.dead_letter, dead_id, EXCLUSIVE)
        row = tx.get(db.dead_letter, dead_id)
        assert row is not None
        e = tx.get(db.endpoint, row["endpoint_id"])
        assert e is not None
        found.append({**row, "endpoint_state": e["state"], "endpoint": e["name"]})
    return found


def read_last_replay(db: Database, tx: Transaction) -> None:
    """Only the text of an error depends on it."""


def write_dead_letter_state(db: Database, tx: Transaction, ids: Sequence[int], state: str) -> None:
    for dead_id in ids:
        tx.change(db.dead_letter, dead_id, state=state)


def is_blocking(db: Database, tx: Transaction, dead_letter: Row) -> bool:
    """Whether a dead letter blocks its lane."""
    block = tx.get(db.lane_block, dead_letter["lane_id"])
    return block is not None and block["seq"] == dead_letter["seq"]


def unblock(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[int]:
    """Unblock the lanes that these dead letters block; returns how many."""
    unblocked = 0
    for dead_id in ids:
        dead_letter = tx.get(db.dead_letter, dead_id)
        assert dead_letter is not None
        if is_blocking(db, tx, dead_letter):
            yield Wait(db.lane_block, dead_letter["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, dead_letter["lane_id"], None)
            unblocked += 1
    return unblocked
