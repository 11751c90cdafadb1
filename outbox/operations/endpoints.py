"""Endpoints: looking at them, and at how far their lanes are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.endpoint import EndpointSettings
from outbox.core.model.endpoint_status import condition
from outbox.core.model.ids import lane_name
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import CLEAR
from outbox.store.endpoints import endpoint_not_found

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

# How far each lane really is: the checkpoint, or what was acknowledged since.  The
# newest acknowledgement is looked up from the end: max() would not be, where the
# statistics are from a time with few lanes.
LANE_STATE = """
SELECT l.endpoint_id, l.id AS lane_id, l.generation, l.slot, c.last_seq, p.floor_batch,
       p.head_seq, p.attempts, p.spent, p.next_attempt_at, p.last_answer,
       greatest(p.acked_seq, (
           SELECT a.seq FROM attempt a
            WHERE a.lane_id = l.id AND a.batch >= p.floor_batch AND a.seq > p.acked_seq
              AND a.outcome = 'delivered'
            ORDER BY a.batch DESC, a.seq DESC LIMIT 1)) AS acked_seq
  FROM lane l
  JOIN lane_counter c ON c.lane_id = l.id
  JOIN lane_progress p ON p.lane_id = l.id
"""

# The columns that EndpointSettings is made of.
SETTINGS = """
       e.name, e.url, e.types, e.tenant, e.all_tenants, e.filter, e.method,
       e.headers::text AS headers, e.connect_timeout_s, e.total_timeout_s, e.in_flight_max,
       e.rate_per_s, e.batch_max, e.allow_networks, e.ca, e.retry::text AS retry, e.retryable,
       e.on_dead_letter, e.backlog_count_max, e.backlog_age_max_s, e.disable_after_s,
       e.checkpoint_every_s, e.lanes
"""

# Whether an endpoint `e` gets what is new, and whether one of its lanes waits for an
# operator.
SUBSCRIBED = """EXISTS (
           SELECT FROM subscription s WHERE s.endpoint_id = e.id AND s.to_batch IS NULL)"""
BLOCKED = """EXISTS (
           SELECT FROM lane l JOIN lane_block b ON b.lane_id = l.id WHERE l.endpoint_id = e.id)"""

_ALL_ENDPOINTS = f"""
SELECT e.id, e.state, e.state_at, e.state_by, e.state_why, e.generation, e.created_at, {SETTINGS},
       e.identity_about, h.state AS health, h.since, h.held_until, h.last_answer,
       {SUBSCRIBED} AS subscribed, {BLOCKED} AS blocked,
       (SELECT coalesce(sum(s.last_seq - s.acked_seq), 0) FROM ({LANE_STATE}) s
         WHERE s.endpoint_id = e.id)::bigint AS owed,
       (SELECT count(*) FROM dead_letter d
         WHERE d.endpoint_id = e.id AND d.state = 'dead') AS dead_letters
  FROM endpoint e JOIN endpoint_health h ON h.endpoint_id = e.id
"""  # noqa: S608 (constants only)

# For a listing, and for roles that may not read headers: these may be credentials.
LIST_ENDPOINTS = _ALL_ENDPOINTS.replace("e.headers::text", "'{}'")

# By name, in the order of its bytes, which is the same in every locale.
_PAGE = """
 WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.name COLLATE "C" > $1)
   AND ($3::text IS NULL OR e.tenant = $3)
 ORDER BY e.name COLLATE "C" LIMIT $2
"""
LIST_PAGE = LIST_ENDPOINTS + _PAGE
LIST_SETTINGS = _ALL_ENDPOINTS + _PAGE

_NAMED = " WHERE e.name = $1 AND e.state <> 'removed'"
GET_ENDPOINT = _ALL_ENDPOINTS + _NAMED
GET_WITHOUT_HEADERS = LIST_ENDPOINTS + _NAMED
MAY_SEE_HEADERS = "SELECT has_column_privilege('endpoint', 'headers', 'SELECT')"
HEADER_NAMES = "SELECT header_names($1)"

GET_LANES = f"""
SELECT s.*, b.seq AS blocked_seq, b.at AS blocked_at
  FROM ({LANE_STATE} WHERE l.endpoint_id = $1) s LEFT JOIN lane_block b ON b.lane_id = s.lane_id
 ORDER BY s.generation, s.slot
"""  # noqa: S608

# The newest first; to look at them takes no right to read them.
LIST_SECRETS = """
SELECT id, key_id, public_key, created_at, expires_at FROM endpoint_secret
 WHERE endpoint_id = $1 AND (expires_at IS NULL OR expires_at > clock_timestamp())
 ORDER BY id DESC
"""

# Who had it when, the newest first.
GET_HANDS = """
SELECT at, kind = 'endpoint_claimed' AS claimed, data ->> 'relay' AS relay,
       (data ->> 'replica')::bigint AS replica_id, (data ->> 'epoch')::bigint AS epoch,
       actor, data ->> 'why' AS why
  FROM journal
 WHERE endpoint_id = $1 AND kind IN ('endpoint_claimed', 'endpoint_freed')
 ORDER BY id DESC LIMIT $2
"""
HANDS_MAX = 10

NOT_SHOWN = "(not shown)"
"""In the place of a value that this role may not read."""


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint as listings show it."""

    id: UUID
    name: str
    url: str
    state: str
    """The operator's word, or the owner's when it disables."""
    state_at: datetime
    state_by: str | None
    state_why: str | None
    condition: str
    """In a word, what its operator said, what waits for one, or how its receiver answers."""
    health: str
    """How well it works."""
    subscribed: bool
    """False: it gets nothing new, because it is disabled or about to be removed."""
    tenant: str | None
    all_tenants: bool
    lanes: int
    generation: int
    """Rises when the lanes change."""
    types: tuple[str, ...]
    owed: int
    """Deliveries that are neither acknowledged nor given up."""
    dead_letters: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class LaneRow:
    """How far a lane is."""

    name: str
    generation: int
    last_seq: int
    acked_seq: int
    attempts: int
    """Of the delivery at its head, when that is failing."""
    probes: int
    """How many of them only found out how its receiver is: they count for no limit."""
    next_attempt_at: datetime | None
    """By its schedule; while its endpoint is not healthy that decides, and not this."""
    last_answer: dict[str, Any] | None
    blocked_seq: int | None
    """The number that was given up, and for which the lane waits for an operator."""
    blocked_at: datetime | None

    @property
    def owed(self) -> int:
        """Deliveries that are neither acknowledged nor given up."""
        return self.last_seq - self.acked_seq


@dataclass(frozen=True, slots=True)
class Health:
    """What its owner knows of how well an endpoint works."""

    state: str
    since: datetime
    held_until: datetime | None
    """The receiver asked to be left alone until then."""
    last_answer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class SecretRow:
    """A live signing secret, which is not shown."""

    id: int
    key_id: str | None
    """Of the key that it is encrypted with; None: it is in clear."""
    public_key: str | None
    """What the receiver has of a private key, `whpk_…`; None: it has the secret."""
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Hand:
    """A change of hands, as the journal tells it."""

    at: datetime
    claimed: bool
    """False: it was freed, and nobody had it."""
    relay: str
    replica_id: int
    """The one that has it, or had it."""
    epoch: int
    actor: str
    """Who did that; who is dead is helped by another one."""
    why: str | None


@dataclass(frozen=True, slots=True)
class Detail:
    """Everything that is known of an endpoint."""

    row: EndpointRow
    settings: EndpointSettings
    health: Health
    secrets: tuple[SecretRow, ...]
    certificate: dict[str, Any] | None
    """What its receiver is shown: subject, the end of its time, fingerprint."""
    lanes: tuple[LaneRow, ...]
    hands: tuple[Hand, ...]
    """The last changes of hands, the newest first."""


async def page(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None = None,
    limit: int = 100,
    after: str | None = None,
) -> list[EndpointRow]:
    """Endpoints by name, at most `limit`, the ones behind `after`.

    Args:
        tenant: only those that are for it alone.
    """
    with map_errors(schema):
        rows = await connection.fetch(LIST_PAGE, after, limit, tenant)
    return [_endpoint(row) for row in rows]


async def settings_page(
    connection: Connection[Any], schema: str, *, limit: int, after: str | None = None
) -> list[tuple[UUID, EndpointSettings]]:
    """The same with all of their settings, and nothing else."""
    with map_errors(schema, "operator"):
        rows = await connection.fetch(LIST_SETTINGS, after, limit, None)
    return [(row["id"], settings_of(row)) for row in rows]


async def get(connection: Connection[Any], schema: str, name: str) -> Detail:
    """One endpoint with everything about it.

    Raises:
        NotFound: there is none of that name.
    """
    with map_errors(schema):
        may_see = await connection.fetchval(MAY_SEE_HEADERS)
        row = await connection.fetchrow(GET_ENDPOINT if may_see else GET_WITHOUT_HEADERS, name)
        if row is None:
            raise await endpoint_not_found(connection, name)
        settings = settings_of(row)
        if not may_see:
            names = await connection.fetchval(HEADER_NAMES, row["id"])
            settings = replace(settings, headers=dict.fromkeys(names, NOT_SHOWN))
        lanes = await connection.fetch(GET_LANES, row["id"])
        secrets = await connection.fetch(LIST_SECRETS, row["id"])
        hands = await connection.fetch(GET_HANDS, row["id"], HANDS_MAX)
    return Detail(
        row=_endpoint(row),
        settings=settings,
        health=Health(row["health"], row["since"], row["held_until"], _json(row["last_answer"])),
        secrets=tuple(SecretRow(**s) for s in secrets),
        certificate=_json(row["identity_about"]),
        lanes=tuple(_lane(lane) for lane in lanes),
        hands=tuple(Hand(**hand) for hand in hands),
    )


def settings_of(row: Any, vault: Vault = CLEAR) -> EndpointSettings:
    """The settings in a row with the columns of SETTINGS and the id.

    Of headers that cannot be read here, the values are `LockedText`.
    """
    values = {field: row[field] for field in EndpointSettings.__dataclass_fields__}
    values["retry"] = _json(row["retry"])
    values["headers"] = vault.open_headers(_json(row["headers"]), row["id"])
    return EndpointSettings.from_dict(values)


def _endpoint(row: Any) -> EndpointRow:
    return EndpointRow(
        id=row["id"],
        name=row["name"],
        url=row["url"],
        state=row["state"],
        state_at=row["state_at"],
        state_by=row["state_by"],
        state_why=row["state_why"],
        condition=condition(
            row["state"], row["health"], blocked=row["blocked"], subscribed=row["subscribed"]
        ),
        health=row["health"],
        subscribed=row["subscribed"],
        tenant=row["tenant"],
        all_tenants=row["all_tenants"],
        lanes=row["lanes"],
        generation=row["generation"],
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
        generation=row["generation"],
        last_seq=row["last_seq"],
        acked_seq=row["acked_seq"],
        attempts=row["attempts"] if failing else 0,
        probes=row["attempts"] - row["spent"] if failing else 0,
        next_attempt_at=row["next_attempt_at"] if failing else None,
        last_answer=_json(row["last_answer"]) if failing else None,
        blocked_seq=row["blocked_seq"],
        blocked_at=row["blocked_at"],
    )


def _json(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)
