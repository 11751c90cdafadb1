"""Endpoint queries: settings, secrets, lane progress and ownership history."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_settings import SETTING_FIELDS, EndpointSettings
from outbox.core.model.ids import lane_name
from outbox.operations.endpoints.filter import EndpointFilter, matches_filter
from outbox.operations.feeds.progress import FeedProgress, read_feeds
from outbox.operations.lanes import (
    BACKLOG,
    BLOCKED,
    DEAD_LETTERS,
    FAILING_LANES,
    FAILING_SINCE,
    LANE_STATE,
    SUBSCRIBED,
    condition_of,
    retry_state,
)
from outbox.operations.pages import convert, read_page, shorten_responses
from outbox.operations.rows import RowPage, from_row, parse_json
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery.endpoints import (
    endpoint_not_found,
    setting_columns,
)

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault


def _select_endpoints(columns: str) -> str:
    """Select all endpoints, with these columns besides those of a listing."""
    return f"""
SELECT e.id, e.state, e.state_at, e.state_by, e.state_comment, e.generation, e.created_at,
       h.state AS health, {columns},
       {SUBSCRIBED} AS subscribed, {BLOCKED} AS blocked, {FAILING_LANES} AS failing_lanes,
       {FAILING_SINCE} AS failing_since,
       {BACKLOG} AS backlog, {DEAD_LETTERS} AS dead_letters
  FROM endpoint e JOIN endpoint_health h ON h.endpoint_id = e.id
"""  # noqa: S608 (constants only)


def _select_details(settings: str) -> str:
    """Select all endpoints with everything."""
    return _select_endpoints(f"""
       {settings}, e.identity_about, h.since, h.held_until, h.last_response, h.unsolicited_at""")


_LIST_ENDPOINTS = _select_endpoints("e.name, e.url, e.types, e.tenant, e.all_tenants, e.lanes")
_LIST_DETAILS = _select_details(setting_columns())


# COLLATE "C": the order of bytes is the same in every locale.
def _page(condition: str = "true") -> str:
    return f"""
 WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.name COLLATE "C" > $1)
   AND ($3::text IS NULL OR e.tenant = $3) AND {condition}
 ORDER BY e.name COLLATE "C" LIMIT $2
"""


_PAGE, _FILTERED_PAGE = _page(), _page(matches_filter(4))
LIST_PAGE = _LIST_ENDPOINTS + _FILTERED_PAGE
COUNT_MATCHING = f"""
SELECT count(*) FROM endpoint e
 WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.tenant = $1) AND {matches_filter(2)}
"""  # noqa: S608 (constants only)
NAMES_PAGE = f"SELECT e.id, e.name FROM endpoint e {_FILTERED_PAGE}"  # noqa: S608 (constants only)
LIST_SETTINGS = f"SELECT e.id, {setting_columns()} FROM endpoint e {_PAGE}"  # noqa: S608

_NAMED = " WHERE e.name = $1 AND e.state <> 'removed'"
GET_ENDPOINT = _LIST_DETAILS + _NAMED
# For roles without the right to read headers, which may hold credentials.
GET_WITHOUT_HEADERS = _select_details(setting_columns("'{}'")) + _NAMED
MAY_SEE_HEADERS = "SELECT has_column_privilege('endpoint', 'headers', 'SELECT')"
HEADER_NAMES = "SELECT header_names($1)"

_FAILING_FIRST = "s.retry_seq IS DISTINCT FROM s.acked_seq + 1, s.generation, s.slot"
GET_LANES = f"""
SELECT s.endpoint_id, s.generation, s.slot, s.last_seq, s.acked_seq, s.retry_seq, s.attempts,
       s.spent, s.next_attempt_at, b.seq AS blocked_seq, b.at AS blocked_at,
       {shorten_responses("s.last_response", _FAILING_FIRST)} AS last_response
  FROM ({LANE_STATE} WHERE l.endpoint_id = $1) s LEFT JOIN lane_block b ON b.lane_id = s.lane_id
 ORDER BY s.generation, s.slot
"""  # noqa: S608

# Newest first.  The statement needs no right to read the column `secret`.
LIST_SECRETS = """
SELECT id, key_id, public_key, compat, created_at, expires_at FROM endpoint_secret
 WHERE endpoint_id = $1 AND (expires_at IS NULL OR expires_at > clock_timestamp())
 ORDER BY id DESC
"""

# Ownership history, newest first.
GET_OWNERSHIP_HISTORY = """
SELECT at, kind = 'endpoint_claimed' AS claimed, data ->> 'relay' AS relay,
       (data ->> 'replica')::bigint AS replica_id, (data ->> 'epoch')::bigint AS epoch,
       actor, data ->> 'reason' AS reason
  FROM journal
 WHERE endpoint_id = $1 AND kind IN ('endpoint_claimed', 'endpoint_released')
 ORDER BY id DESC LIMIT $2
"""
OWNERSHIP_HISTORY_MAX = 10

ANY = EndpointFilter()

NOT_SHOWN = "(not shown)"
"""Placeholder for a value that this role may not read."""


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint in a listing."""

    id: UUID
    name: str
    url: str
    state: str
    """Operational state, set by an operator, or by the owner when it disables the endpoint."""
    state_at: datetime
    state_by: str | None
    state_comment: str | None
    condition: str
    """One word from operational state, lanes and circuit breaker."""
    health: str
    """State of the circuit breaker."""
    subscribed: bool
    """Whether it receives new events; False: it is disabled or being removed."""
    tenant: str | None
    all_tenants: bool
    lanes: int
    failing_lanes: int
    """Lanes whose first pending delivery has failed at least once."""
    failing_since: datetime | None
    """The first attempt of the failing delivery whose retries began first, or when the circuit
    breaker opened, if that was earlier; None: nothing fails."""
    generation: int
    """Incremented when the number of lanes changes."""
    types: tuple[str, ...]
    pending: int
    """Deliveries that are neither acknowledged nor dead-lettered."""
    oldest_s: float | None
    """Age of the oldest event among them, in seconds; None: none is pending."""
    dead_letters: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class LaneRow:
    """Progress of a lane."""

    name: str
    generation: int
    last_seq: int
    acked_seq: int
    attempts: int
    """The attempts of the first pending delivery; 0 unless it is failing."""
    probes: int
    """Attempts that only probed the receiver; they do not count against the retry limit."""
    next_attempt_at: datetime | None
    """The time of the next attempt by the retry policy; while the circuit breaker is open, its
    probes decide instead."""
    last_response: dict[str, Any] | None
    blocked_seq: int | None
    """Sequence number of the dead letter that blocks the lane."""
    blocked_at: datetime | None

    @property
    def pending(self) -> int:
        """Deliveries that are neither acknowledged nor dead-lettered."""
        return self.last_seq - self.acked_seq


@dataclass(frozen=True, slots=True)
class EndpointHealth:
    """State of an endpoint's circuit breaker."""

    state: str
    since: datetime
    """When the circuit breaker entered this state."""
    held_until: datetime | None
    """Hold-off from the receiver's Retry-After."""
    last_response: dict[str, Any] | None
    unsolicited_at: datetime | None
    """When the receiver last sent data that belongs to no request."""


@dataclass(frozen=True, slots=True)
class SecretRow:
    """A live secret, without its value."""

    id: int
    key_id: str | None
    """Key that the secret is encrypted with; None: it is stored in clear."""
    public_key: str | None
    """Public key of an Ed25519 secret, `whpk_…`; None: a symmetric secret."""
    compat: bool
    """Whether it is of the compat signature."""
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """A change of an endpoint's ownership, from the journal."""

    at: datetime
    claimed: bool
    """Whether the relay acquired the endpoint; False: it was released."""
    relay: str
    replica_id: int
    """Replica id of the relay that acquired or held the endpoint."""
    epoch: int
    actor: str
    """The relay or operator that made the change; an expired replica is released by another one."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class EndpointDetail:
    """An endpoint with its settings, secrets, lanes and ownership history."""

    endpoint: EndpointRow
    settings: dict[str, Any]
    """The settings by public name, as in a file; header values are null."""
    health: EndpointHealth
    secrets: tuple[SecretRow, ...]
    certificate: dict[str, Any] | None
    """Client certificate for mutual TLS: subject, expiry, fingerprint."""
    lanes: tuple[LaneRow, ...]
    ownership_history: tuple[OwnershipRecord, ...]
    """The last changes of ownership, newest first; empty for tenant tokens."""
    feed: FeedProgress | None
    """How far it is with earlier events, which it gets before new ones; null: it gets all as they
    are sequenced."""


async def list_endpoints(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None = None,
    only: EndpointFilter = ANY,
    limit: int = 100,
    after: str | None = None,
) -> RowPage[EndpointRow]:
    """List endpoints by name, at most `limit`, starting after the name `after`.

    There are fewer if they are large, as in `outbox.operations.pages`.

    Args:
        tenant: only endpoints of this tenant alone.
    """
    with map_errors(schema):
        page = await read_page(connection, LIST_PAGE, "name", after, limit, tenant, *only.arguments)
    return await convert(page, _endpoint)


async def count_endpoints(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None = None,
    only: EndpointFilter = ANY,
) -> int:
    """Count the endpoints that a listing has on all of its pages.

    Args:
        tenant: only endpoints of this tenant alone.
    """
    with map_errors(schema):
        found: int = await connection.fetchval(COUNT_MATCHING, tenant, *only.arguments)
    return found


async def list_settings(
    connection: Connection[Any], schema: str, *, limit: int, after: str | None = None
) -> RowPage[tuple[UUID, EndpointSettings]]:
    """List endpoints like `list_endpoints`, as id and settings."""
    with map_errors(schema, "operator"):
        page = await read_page(connection, LIST_SETTINGS, "name", after, limit, None)
    return await convert(page, lambda row: (row["id"], settings_of(row)))


def declaration(found: tuple[UUID, EndpointSettings]) -> dict[str, Any]:
    """An endpoint as in a file for `outbox apply`."""
    endpoint_id, settings = found
    return {"id": str(endpoint_id), **endpoint_config.to_file_values(settings)}


async def get_endpoint(connection: Connection[Any], schema: str, name: str) -> EndpointDetail:
    """Read one endpoint with all details.

    Raises:
        NotFound: no endpoint has this name.
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
        history = await connection.fetch(GET_OWNERSHIP_HISTORY, row["id"], OWNERSHIP_HISTORY_MAX)
        feeds = await read_feeds(connection, endpoint_ids=[row["id"]])
    return EndpointDetail(
        endpoint=_endpoint(row),
        settings=endpoint_config.public_settings(settings),
        health=from_row(EndpointHealth, row, state=row["health"], parse=("last_response",)),
        secrets=tuple(SecretRow(**s) for s in secrets),
        certificate=parse_json(row["identity_about"]),
        lanes=tuple(_lane(lane) for lane in lanes),
        ownership_history=tuple(OwnershipRecord(**record) for record in history),
        feed=feeds[0] if feeds else None,
    )


def settings_of(row: Any, vault: Vault = CLEAR) -> EndpointSettings:
    """Parse the settings from a row with the columns of `setting_columns` and the id.

    Headers that the vault cannot decrypt have `LockedText` as their value.
    """
    values = {field: row[field] for field in SETTING_FIELDS}
    values["retry"], values["compat"] = parse_json(row["retry"]), parse_json(row["compat"])
    values["headers"] = vault.open_headers(parse_json(row["headers"]), row["id"])
    return EndpointSettings.from_dict(values)


def _endpoint(row: Any) -> EndpointRow:
    pending, oldest_s = row["backlog"]
    return from_row(
        EndpointRow,
        row,
        condition=condition_of(row),
        types=tuple(row["types"]),
        pending=int(pending),
        oldest_s=oldest_s,
    )


def _lane(row: Any) -> LaneRow:
    return LaneRow(
        name=lane_name(row["endpoint_id"], row["generation"], row["slot"]),
        generation=row["generation"],
        last_seq=row["last_seq"],
        acked_seq=row["acked_seq"],
        blocked_seq=row["blocked_seq"],
        blocked_at=row["blocked_at"],
        **retry_state(row, failing=row["retry_seq"] == row["acked_seq"] + 1),
    )
