"""Endpoints: adding, looking at and removing them."""

from __future__ import annotations

import difflib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core import pattern
from outbox.core.event import TENANT_BYTES_MAX, check_text
from outbox.core.identity import lane_name
from outbox.core.retry import STANDARD
from outbox.core.signature import format_secret
from outbox.errors import NotFound, UsageError
from outbox.store.changes import change, write_journal
from outbox.store.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

NAME_BYTES_MAX = 200
LANES_MAX = 1024
SECRET_BYTES = 32
EVERYTHING = "**"

# Under the cursor row, so nobody else adds one of the same name meanwhile.
FIND_NAME = "SELECT state FROM endpoint WHERE name = $1 AND state <> 'removed'"

# Ids given out that no batch has seen; some of them may be rolled back.
COUNT_WAITING = """
SELECT greatest(0, coalesce(
           pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0) - b.high)
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

ADD_ENDPOINT = """
INSERT INTO endpoint (name, url, types, tenant, all_tenants, lanes, retry)
VALUES ($1, $2, $3, $4, $5, $6, $7::text::jsonb)
RETURNING id, created_at
"""

ADD_SECRET = "INSERT INTO endpoint_secret (endpoint_id, id, secret) VALUES ($1, 1, $2)"  # noqa: S105

ADD_SUBSCRIPTION = """
INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants)
VALUES ($1, $2, $3, $4, $5)
"""

# Lanes with their counters and progress.  Nothing below the first batch can be
# owed, so reads need not look at the partitions of older ones.
ADD_LANES = """
WITH added AS (
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT $1, 1, slot FROM generate_series(0, $2 - 1) AS slot
    RETURNING id),
counted AS (
    INSERT INTO lane_counter (lane_id) SELECT id FROM added)
INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch) SELECT id, $1, $3 FROM added
"""

ADD_HEALTH = "INSERT INTO endpoint_health (endpoint_id) VALUES ($1)"

# Free to be claimed by any replica.
ADD_OWNERSHIP = "INSERT INTO ownership (endpoint_id) VALUES ($1)"

# How far each lane really is: the checkpoint, or what was acknowledged since.
LANE_STATE = """
SELECT l.endpoint_id, l.id AS lane_id, l.generation, l.slot, c.last_seq, p.floor_batch,
       p.head_seq, p.attempts, p.next_attempt_at, p.last_answer,
       greatest(p.acked_seq, (
           SELECT max(a.seq) FROM attempt a
            WHERE a.lane_id = l.id AND a.batch >= p.floor_batch AND a.seq > p.acked_seq
              AND a.outcome = 'delivered')) AS acked_seq
  FROM lane l
  JOIN lane_counter c ON c.lane_id = l.id
  JOIN lane_progress p ON p.lane_id = l.id
"""

LIST_ENDPOINTS = f"""
SELECT e.id, e.name, e.url, e.state, e.tenant, e.all_tenants, e.lanes, e.created_at,
       (SELECT s.types FROM subscription s WHERE s.endpoint_id = e.id
         ORDER BY s.from_batch DESC LIMIT 1) AS types,
       (SELECT coalesce(sum(s.last_seq - s.acked_seq), 0) FROM ({LANE_STATE}) s
         WHERE s.endpoint_id = e.id)::bigint AS owed,
       (SELECT count(*) FROM dead_letter d
         WHERE d.endpoint_id = e.id AND d.state = 'dead') AS dead_letters
  FROM endpoint e
"""  # noqa: S608 (constants only)

# By name, in the order of its bytes, which is the same in every locale.
LIST_PAGE = f"""{LIST_ENDPOINTS}
 WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.name COLLATE "C" > $1)
 ORDER BY e.name COLLATE "C" LIMIT $2
"""

GET_ENDPOINT = f"{LIST_ENDPOINTS} WHERE e.name = $1 AND e.state <> 'removed'"

GET_LANES = f"{LANE_STATE} WHERE l.endpoint_id = $1 ORDER BY l.generation, l.slot"

# Locked against another removal of the same endpoint, and not against new dead
# letters, which refer to it.
LOCK_ENDPOINT = """
SELECT id, state FROM endpoint WHERE name = $1 AND state <> 'removed' FOR NO KEY UPDATE
"""

LIST_NAMES = (
    "SELECT name FROM endpoint WHERE state <> 'removed' ORDER BY created_at DESC LIMIT 1000"
)

COUNT_OWED = f"""
SELECT coalesce(sum(s.last_seq - s.acked_seq), 0)::bigint FROM ({LANE_STATE}) s
 WHERE s.endpoint_id = $1
"""  # noqa: S608

END_SUBSCRIPTION = """
UPDATE subscription SET to_batch = $2 WHERE endpoint_id = $1 AND to_batch IS NULL
"""

# Replays that no batch has taken yet never will be: their dead letters are dead
# as before.
CALL_OFF_REPLAYS = """
WITH called_off AS (
    DELETE FROM replay r USING dead_letter d
     WHERE r.dead_id = d.id AND d.endpoint_id = $1 AND r.batch IS NULL
    RETURNING r.dead_id)
UPDATE dead_letter SET state = 'dead' WHERE id IN (SELECT dead_id FROM called_off)
"""

FORGET_SECRETS = "DELETE FROM endpoint_secret WHERE endpoint_id = $1"

SET_STATE = "UPDATE endpoint SET state = $2 WHERE id = $1"


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """What `add` made; the secret is shown this once."""

    id: UUID
    name: str
    url: str
    secret: str
    lanes: int
    types: tuple[str, ...]
    from_batch: int
    waiting: int
    """At most so many events are not sequenced yet; it gets those, too."""


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint as listings show it."""

    id: UUID
    name: str
    url: str
    state: str
    tenant: str | None
    all_tenants: bool
    lanes: int
    types: tuple[str, ...]
    owed: int
    """Deliveries that are neither acknowledged nor given up."""
    dead_letters: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class LaneRow:
    """How far a lane is."""

    name: str
    last_seq: int
    acked_seq: int
    attempts: int
    """Of the delivery at its head, when that is failing."""
    next_attempt_at: datetime | None
    last_answer: dict[str, Any] | None

    @property
    def owed(self) -> int:
        """Deliveries that are neither acknowledged nor given up."""
        return self.last_seq - self.acked_seq


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of an endpoint: `removed`, or `removing` until its owner gave up the rest."""

    id: UUID
    name: str
    state: str
    owed: int


async def add(
    connection: Connection[Any],
    schema: str,
    *,
    name: str,
    url: str,
    actor: str,
    types: Sequence[str] = (),
    tenant: str | None = None,
    all_tenants: bool = False,
    lanes: int = 1,
    retry: Mapping[str, Any] | None = None,
) -> NewEndpoint:
    """Add an endpoint; it gets what is not sequenced yet, and everything after it.

    Args:
        url: checked by the caller, who knows which networks are open.
        types: patterns; none means everything but operational events.
        retry: the numbers of a RetryPolicy; the preset `standard` without it.

    Raises:
        UsageError: a bad name, pattern or number, or the name is taken.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    _check_name(name)
    patterns = list(dict.fromkeys(types)) or [EVERYTHING]
    for each in patterns:
        pattern.parse(each)
    if tenant is not None:
        if all_tenants:
            raise UsageError("an endpoint is for one tenant or for all, not both")
        check_text("tenant", tenant, TENANT_BYTES_MAX)
    if not 1 <= lanes <= LANES_MAX:
        raise UsageError(f"lanes: must be between 1 and {LANES_MAX}, not {lanes}")
    numbers = orjson.dumps(dict(retry or STANDARD.to_dict())).decode()
    secret = format_secret(secrets.token_bytes(SECRET_BYTES))
    async with change(connection, schema) as from_batch:
        state = await connection.fetchval(FIND_NAME, name)
        if state is not None:
            raise _name_taken(name, state)
        waiting: int = await connection.fetchval(COUNT_WAITING)
        row = await connection.fetchrow(
            ADD_ENDPOINT, name, url, patterns, tenant, all_tenants, lanes, numbers
        )
        endpoint_id = row["id"]
        await connection.execute(ADD_SECRET, endpoint_id, secret)
        await connection.execute(
            ADD_SUBSCRIPTION, endpoint_id, from_batch, patterns, tenant, all_tenants
        )
        await connection.execute(ADD_LANES, endpoint_id, lanes, from_batch)
        await connection.execute(ADD_HEALTH, endpoint_id)
        await connection.execute(ADD_OWNERSHIP, endpoint_id)
        settings = {
            "name": name,
            "url": url,
            "types": patterns,
            "tenant": tenant,
            "all_tenants": all_tenants,
            "lanes": lanes,
            "from_batch": from_batch,
        }
        await write_journal(connection, "endpoint_added", actor, endpoint_id, settings)
    return NewEndpoint(
        id=endpoint_id,
        name=name,
        url=url,
        secret=secret,
        lanes=lanes,
        types=tuple(patterns),
        from_batch=from_batch,
        waiting=waiting,
    )


async def page(
    connection: Connection[Any], schema: str, *, limit: int = 100, after: str | None = None
) -> list[EndpointRow]:
    """Endpoints by name, at most `limit`, the ones behind `after`."""
    with map_errors(schema):
        return [_endpoint(row) for row in await connection.fetch(LIST_PAGE, after, limit)]


async def get(
    connection: Connection[Any], schema: str, name: str
) -> tuple[EndpointRow, list[LaneRow]]:
    """One endpoint with its lanes.

    Raises:
        NotFound: there is none of that name.
    """
    with map_errors(schema):
        row = await connection.fetchrow(GET_ENDPOINT, name)
        if row is None:
            raise await not_found(connection, name)
        lanes = await connection.fetch(GET_LANES, row["id"])
    return _endpoint(row), [_lane(lane) for lane in lanes]


async def remove(
    connection: Connection[Any], schema: str, *, name: str, actor: str, give_up: bool = False
) -> Removal:
    """Remove an endpoint: it gets nothing from the next batch on.

    When it is still owed deliveries, its owner gives them up as one
    dead-letter range per lane; without an owner that happens when a relay
    starts.  The name is free again when that is done.

    Raises:
        NotFound: there is none of that name.
        UsageError: it is owed deliveries, and `give_up` was not said.
    """
    async with change(connection, schema) as from_batch:
        row = await connection.fetchrow(LOCK_ENDPOINT, name)
        if row is None:
            raise await not_found(connection, name)
        endpoint_id = row["id"]
        owed: int = await connection.fetchval(COUNT_OWED, endpoint_id)
        if row["state"] == "removing":
            return Removal(endpoint_id, name, "removing", owed)
        if owed and not give_up:
            raise UsageError(
                f'endpoint "{name}" is owed {owed} deliveries; wait for them, or say --give-up '
                "to give them up for good"
            )
        state = "removing" if owed else "removed"
        await connection.execute(END_SUBSCRIPTION, endpoint_id, from_batch)
        await connection.execute(CALL_OFF_REPLAYS, endpoint_id)
        await connection.execute(SET_STATE, endpoint_id, state)
        told = {"name": name, "owed": owed, "to_batch": from_batch}
        await write_journal(connection, "endpoint_removing", actor, endpoint_id, told)
        if state == "removed":
            await connection.execute(FORGET_SECRETS, endpoint_id)
            await write_journal(connection, "endpoint_removed", actor, endpoint_id, {"given_up": 0})
    return Removal(endpoint_id, name, state, owed)


async def not_found(connection: Connection[Any], name: str) -> NotFound:
    """The error for a name that no endpoint has, with the nearest one."""
    names = [row["name"] for row in await connection.fetch(LIST_NAMES)]
    near = difflib.get_close_matches(name, names, 1)
    hint = f'did you mean "{near[0]}"?' if near else "see: outbox endpoint list"
    return NotFound(f'there is no endpoint "{name}"; {hint}')


def _name_taken(name: str, state: str) -> UsageError:
    if state == "removing":
        return UsageError(
            f'endpoint "{name}" is being removed; its name is free when a relay has finished that'
        )
    return UsageError(f'endpoint "{name}" exists already; choose another name, or remove it first')


def _check_name(name: str) -> None:
    if not name or name != name.strip() or not name.isprintable():
        raise UsageError("the endpoint's name must be printable text without spaces around it")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise UsageError(f"the endpoint's name is longer than {NAME_BYTES_MAX} bytes")


def _endpoint(row: Any) -> EndpointRow:
    return EndpointRow(
        id=row["id"],
        name=row["name"],
        url=row["url"],
        state=row["state"],
        tenant=row["tenant"],
        all_tenants=row["all_tenants"],
        lanes=row["lanes"],
        types=tuple(row["types"]),
        owed=row["owed"],
        dead_letters=row["dead_letters"],
        created_at=row["created_at"],
    )


def _lane(row: Any) -> LaneRow:
    # Retry state names its number; that of an earlier one is stale.
    failing = row["head_seq"] == row["acked_seq"] + 1
    return LaneRow(
        name=lane_name(row["endpoint_id"], row["generation"], row["slot"]),
        last_seq=row["last_seq"],
        acked_seq=row["acked_seq"],
        attempts=row["attempts"] if failing else 0,
        next_attempt_at=row["next_attempt_at"] if failing else None,
        last_answer=orjson.loads(row["last_answer"]) if failing and row["last_answer"] else None,
    )
