"""Endpoints as their owner needs them: configuration, and state of the circuit breaker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.brokers.port import APPEND_MAX
from outbox.core.delivery.circuit_breaker import BreakerRecord, BreakerState
from outbox.core.delivery.connection_reuse import ConnectionReuse
from outbox.core.delivery.operational_events import ReportedState
from outbox.core.messages.signature import parse_signing_key
from outbox.core.model import headers, retryable_statuses
from outbox.core.model.delivery import epoch_seconds
from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_settings import TIMEOUT_S_MAX
from outbox.core.model.ids import lane_name
from outbox.core.model.message_format import DEFAULT_SOURCE, ENVELOPE, MessageFormat
from outbox.core.model.response_policy import RETRYABLE
from outbox.core.model.retry_policy import STANDARD, RetryPolicy
from outbox.core.model.setting_types import HeaderPrefix, UriReference
from outbox.core.model.text import closest
from outbox.errors import CannotRun, NotFound, UsageError
from outbox.store.connection.connect import map_errors
from outbox.store.connection.row_security import (
    require_unprotected,
    rows_hidden,
    stop_hidden,
)
from outbox.store.connection.secrets import (
    IDENTITY,
    SIGNING,
    AlteredSecret,
    UnreadableSecret,
    unreadable_values,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.messages.signature import SigningKey
    from outbox.core.model.headers import EndpointHeaders
    from outbox.store.connection.secrets import Vault

# Configuration, secrets and circuit-breaker state of endpoints.
READ_ENDPOINTS = f"""
SELECT e.id, e.name, e.tenant, e.state, e.url, e.method, e.headers::text AS headers,
       e.header_prefix, e.format, e.source,
       e.connect_timeout_s, e.timeout_s, e.in_flight_max, e.rate_per_s, e.batch_max,
       e.allow_networks, e.ca, e.identity, e.retry::text AS retry, e.retryable, e.on_dead_letter,
       e.on_missing, e.on_forgotten, e.backlog_max, e.backlog_age_s, e.disable_after_s,
       e.keep_alive, e.generation, e.lanes, e.resumes, h.state AS health,
       h.resumes AS applied_resumes, h.since, h.held_until,
       h.last_response::text AS last_response, h.reported_held_since, h.reported_stalled_at,
       h.unsolicited_at,
       array(SELECT (s.secret, s.expires_at) FROM endpoint_secret s
              WHERE s.endpoint_id = e.id
                AND (s.expires_at IS NULL OR s.expires_at > clock_timestamp())
              ORDER BY s.id DESC) AS secrets,
       {rows_hidden("endpoint_secret")} AS hidden
  FROM endpoint e JOIN endpoint_health h ON h.endpoint_id = e.id
 WHERE e.id = ANY ($1)
"""  # noqa: S608 (constants only)

# Names for a "did you mean" hint.
LIST_NAMES = (
    "SELECT name FROM endpoint WHERE state <> 'removed' ORDER BY created_at DESC LIMIT 1000"
)
# The id of the endpoint with a name; names of removed endpoints may repeat.
FIND_ID = "SELECT id FROM endpoint WHERE name = $1 AND state <> 'removed'"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Configuration and stored state of a destination; times are epoch seconds."""

    id: UUID
    name: str
    tenant: str | None
    state: str
    """State set by the operator: `active`, `paused`, `disabling`, `removing`, …"""
    url: str
    method: str
    headers: EndpointHeaders = field(repr=False)
    secrets: tuple[tuple[SigningKey, float | None], ...] = field(repr=False)
    """Signing keys with their expiry; None: no expiry."""
    connect_timeout_s: float
    timeout_s: float
    in_flight_max: int | None
    rate_per_s: float | None
    batch_max: int | None
    """Maximum number of deliveries per request, sent as an array; None: one per request.  For a
    broker, the deliveries of one append."""
    networks: tuple[IPv4Network | IPv6Network, ...]
    """Networks allowed for this endpoint, in addition to those allowed by the relay."""
    ca: str | None
    """CA certificates (PEM) that replace the system's."""
    identity: str | None = field(repr=False)
    """Client certificate and private key (PEM), for mutual TLS."""
    retry: RetryPolicy
    retryable: frozenset[int]
    blocks: bool
    """A dead letter blocks its lane until an operator decides."""
    backlog_max: int | None
    backlog_age_s: float | None
    disable_after_s: float
    generation: int
    resumes: int
    """A number that increases when an operator resumes the endpoint."""
    applied_resumes: int
    """`resumes`, as last applied by an owner."""
    health: BreakerRecord
    """Stored by the last owner."""
    reported: ReportedState
    """The states that operational events have reported, and that have not ended."""
    reuse: ConnectionReuse
    """Whether its connections are reused."""
    holds_missing: bool = False
    refills_forgotten: bool = False
    """A delivery whose event is gone holds its lane, instead of being dead-lettered."""
    message_format: MessageFormat = ENVELOPE
    lanes: int = 1
    """Number of lanes of the current generation."""
    problem: str | None = None
    """Why the endpoint cannot be used as it is configured."""
    failure: type[CannotRun] = CannotRun
    """The kind of the problem, which `require_usable` raises."""

    @property
    def ends(self) -> bool:
        """It is being disabled or removed: its pending deliveries are dead-lettered."""
        return self.state not in ("active", "paused")

    @property
    def usable(self) -> bool:
        """Whether deliveries may be sent to it, now or after it is resumed."""
        return not self.ends and self.problem is None

    @property
    def lane_names(self) -> list[str]:
        """The names of the lanes of the current generation."""
        return [lane_name(self.id, self.generation, slot) for slot in range(self.lanes)]

    @property
    def secret_altered(self) -> bool:
        """Whether the problem is an alarm: a secret was changed in the table."""
        return issubclass(self.failure, AlteredSecret)

    @property
    def credentials(self) -> tuple[str, ...]:
        """The credentials in its headers, which must not be stored or logged."""
        if not self.headers.own:
            return ()
        # Also without the scheme ("Bearer"), because receivers may echo only the token.
        values = [value for _, value in self.headers.own]
        return (*values, *(value.rpartition(" ")[2] for value in values if " " in value))

    def secrets_at(self, now: float) -> list[SigningKey]:
        """The valid signing keys; two during a rotation."""
        return [secret for secret, ends_at in self.secrets if ends_at is None or now < ends_at]


async def read_endpoints(
    connection: Connection[Any], endpoint_ids: Collection[UUID], vault: Vault
) -> list[Endpoint]:
    """Read the current configuration of endpoints; asyncpg's errors propagate.

    Raises:
        CursorBroken: secrets may be hidden.
    """
    rows = await connection.fetch(READ_ENDPOINTS, list(endpoint_ids))
    if any(row["hidden"] for row in rows):
        await stop_hidden(connection)
    if len(rows) < len(endpoint_ids):
        await require_unprotected(connection)
    return [_endpoint(row, vault) for row in rows]


async def find_endpoint(
    connection: Connection[Any], schema: str, name: str, vault: Vault
) -> Endpoint:
    """Find an endpoint by name, in order to send something to it.

    Raises:
        NotFound: there is no such endpoint.
        CannotRun: as in `require_usable`.
    """
    with map_errors(schema):
        endpoint_id = await connection.fetchval(FIND_ID, name)
        found = (
            [] if endpoint_id is None else await read_endpoints(connection, [endpoint_id], vault)
        )
        if not found:
            raise await endpoint_not_found(connection, name)
    require_usable(found[0])
    return found[0]


def require_usable(endpoint: Endpoint) -> None:
    """Check that an endpoint can be used as it is configured.

    Raises:
        CannotRun: it cannot; `UnreadableSecret` or `AlteredSecret` because of a secret.
    """
    if endpoint.problem is not None:
        raise endpoint.failure(f'endpoint "{endpoint.name}": {endpoint.problem}')


def _endpoint(row: Any, vault: Vault) -> Endpoint:
    """Build an endpoint; an invalid one gets a `problem`, so that it does not stop the others."""
    retry, retryable, problem = STANDARD, RETRYABLE, None
    failure: type[CannotRun] = CannotRun
    secrets: tuple[tuple[SigningKey, float | None], ...] = ()
    endpoint_id, own, identity = row["id"], {}, None
    header_prefix, source = headers.DEFAULT_PREFIX, DEFAULT_SOURCE
    timeouts = (row["connect_timeout_s"], row["timeout_s"])
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    try:
        retry = _policy(row["retry"])
        if row["retryable"] is not None:
            retryable = retryable_statuses.parse(row["retryable"])
        secrets = tuple(
            (parse_signing_key(vault.open(text, endpoint_id, SIGNING)), at and at.timestamp())
            for text, at in row["secrets"]
        )
        if not secrets:
            raise UsageError("secret: there is no valid signing secret")
        if not all(0 < t <= TIMEOUT_S_MAX for t in timeouts):
            raise UsageError(f"time-outs: must be more than 0 and at most {TIMEOUT_S_MAX} s")
        networks = tuple(map(ip_network, row["allow_networks"]))
        # In a table that was edited by hand it may hold a line break.
        header_prefix = HeaderPrefix().validate("header_prefix", row["header_prefix"])
        source = UriReference().validate("source", row["source"])
        stored = orjson.loads(row["headers"])
        if not isinstance(stored, dict):
            raise UsageError("headers: must be an object of names and values")
        own = vault.open_headers(stored, endpoint_id)
        for locked in unreadable_values(own):
            raise locked.error
        if row["identity"] is not None:
            identity = vault.open(row["identity"], endpoint_id, IDENTITY)
    except (UnreadableSecret, UsageError, TypeError, ValueError) as error:
        problem = str(error)
        failure = type(error) if isinstance(error, UnreadableSecret) else CannotRun
    return Endpoint(
        id=endpoint_id,
        name=row["name"],
        tenant=row["tenant"],
        state=row["state"],
        url=row["url"],
        method=row["method"],
        headers=headers.valid_headers(own, header_prefix),
        message_format=MessageFormat(row["format"], source),
        lanes=row["lanes"],
        secrets=secrets,
        connect_timeout_s=timeouts[0],
        timeout_s=timeouts[1],
        in_flight_max=row["in_flight_max"],
        rate_per_s=row["rate_per_s"],
        batch_max=row["batch_max"] if not is_stream(row["url"]) else APPEND_MAX,
        networks=networks,
        ca=row["ca"],
        identity=identity,
        retry=retry,
        retryable=retryable,
        blocks=row["on_dead_letter"] == "block",
        holds_missing=row["on_missing"] == "hold",
        refills_forgotten=row["on_forgotten"] == "refill",
        backlog_max=row["backlog_max"],
        backlog_age_s=row["backlog_age_s"],
        disable_after_s=row["disable_after_s"],
        generation=row["generation"],
        resumes=row["resumes"],
        applied_resumes=row["applied_resumes"],
        health=BreakerRecord(
            BreakerState(row["health"]),
            row["since"].timestamp(),
            epoch_seconds(row["held_until"]),
            row["last_response"] and orjson.loads(row["last_response"]),
        ),
        reported=ReportedState(
            epoch_seconds(row["reported_held_since"]), epoch_seconds(row["reported_stalled_at"])
        ),
        reuse=ConnectionReuse(row["keep_alive"], epoch_seconds(row["unsolicited_at"])),
        problem=problem,
        failure=failure,
    )


@lru_cache(256)
def _policy(text: str) -> RetryPolicy:
    """Cached: most endpoints share a few policies."""
    return RetryPolicy.from_dict(orjson.loads(text))


async def endpoint_not_found(connection: Connection[Any], name: str) -> NotFound:
    """The error for an unknown endpoint name, with the closest match."""
    names = [row["name"] for row in await connection.fetch(LIST_NAMES)]
    near = closest(name, names)
    hint = f'did you mean "{near}"?' if near else "see: outbox endpoint list"
    return NotFound(f'there is no endpoint "{name}"; {hint}')
