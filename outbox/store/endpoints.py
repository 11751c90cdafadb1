"""Endpoints as their owner needs them: where to send, how, and how it went so far."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.delivery.circuit_breaker import HealthRecord, State
from outbox.core.delivery.operational_events import Told
from outbox.core.delivery.signature import parse_signing_key
from outbox.core.model import headers, http_status
from outbox.core.model.response import RETRYABLE
from outbox.core.model.retry_policy import STANDARD, RetryPolicy
from outbox.errors import CannotRun, NotFound, UsageError
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import IDENTITY, SIGNING, Locked, locked_values

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.delivery.signature import SigningKey
    from outbox.core.model.response import Headers
    from outbox.store.connection.secrets import Vault

TIMEOUT_S_MAX = 3600.0

READ_ENDPOINTS = """
SELECT e.id, e.name, e.tenant, e.state, e.url, e.method, e.headers::text AS headers,
       e.connect_timeout_s, e.total_timeout_s, e.in_flight_max, e.rate_per_s, e.batch_max,
       e.allow_networks, e.ca, e.identity, e.retry::text AS retry, e.retryable, e.on_dead_letter,
       e.backlog_count_max, e.backlog_age_max_s, e.disable_after_s, e.checkpoint_every_s,
       e.generation, e.resumes, h.state AS health, h.resumes AS obeyed, h.since, h.held_until,
       h.last_answer::text AS last_answer, h.told_held_since, h.told_stalled_at,
       array(SELECT (s.secret, s.expires_at) FROM endpoint_secret s
              WHERE s.endpoint_id = e.id
                AND (s.expires_at IS NULL OR s.expires_at > clock_timestamp())
              ORDER BY s.id DESC) AS secrets
  FROM endpoint e JOIN endpoint_health h ON h.endpoint_id = e.id
 WHERE e.id = ANY ($1)
"""

LIST_NAMES = (
    "SELECT name FROM endpoint WHERE state <> 'removed' ORDER BY created_at DESC LIMIT 1000"
)
FIND_ID = "SELECT id FROM endpoint WHERE name = $1 AND state <> 'removed'"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What its owner needs to know of a destination; times are epoch seconds."""

    id: UUID
    name: str
    tenant: str | None
    state: str
    """The operator's word: `active`, `paused`, `disabling`, `removing`, …"""
    url: str
    method: str
    headers: Headers = field(repr=False)
    secrets: tuple[tuple[SigningKey, float | None], ...] = field(repr=False)
    """With the time at which each ends; None: it does not."""
    connect_timeout_s: float
    total_timeout_s: float
    in_flight_max: int | None
    rate_per_s: float | None
    batch_max: int | None
    """So many deliveries go in one request, as an array; None: each by itself."""
    networks: tuple[IPv4Network | IPv6Network, ...]
    """Opened for it, beside those that the relay opens."""
    ca: str | None
    """Certificates (PEM) that are trusted instead of the system's."""
    identity: str | None = field(repr=False)
    """Our own certificate and its key (PEM), for mutual TLS."""
    retry: RetryPolicy
    retryable: frozenset[int]
    blocks: bool
    """A lane waits for an operator after a delivery was given up."""
    backlog_count_max: int | None
    backlog_age_max_s: float | None
    disable_after_s: float
    checkpoint_every_s: float | None
    """None: never."""
    generation: int
    resumes: int
    """Rises when an operator says that it shall be tried now."""
    obeyed: int
    """The same, as its last owner knew it."""
    health: HealthRecord
    """As its last owner left it."""
    told: Told
    """What operational events told of it, and is not over."""
    problem: str | None = None
    """Why it cannot be used as it is set up."""

    @property
    def ends(self) -> bool:
        """It is being disabled or removed: what it is owed is given up."""
        return self.state not in ("active", "paused")

    @property
    def usable(self) -> bool:
        """Whether deliveries may be sent to it, now or when it is resumed."""
        return not self.ends and self.problem is None

    @property
    def credentials(self) -> tuple[str, ...]:
        """What its requests hold that is not to be kept."""
        if not self.headers:
            return ()
        # Also without "Bearer", because that is how receivers look at it.
        values = [value for _, value in self.headers]
        return (*values, *(value.rpartition(" ")[2] for value in values if " " in value))

    def secrets_at(self, now: float) -> list[SigningKey]:
        """What to sign with; while one replaces the other, both."""
        return [secret for secret, ends_at in self.secrets if ends_at is None or now < ends_at]


async def read(
    connection: Connection[Any], endpoint_ids: Collection[UUID], vault: Vault
) -> list[Endpoint]:
    """The endpoints as they are set up now; asyncpg's errors pass through."""
    rows = await connection.fetch(READ_ENDPOINTS, list(endpoint_ids))
    return [_endpoint(row, vault) for row in rows]


async def find(connection: Connection[Any], schema: str, name: str, vault: Vault) -> Endpoint:
    """The endpoint of this name, for whoever sends something to it just now.

    Raises:
        NotFound: there is none.
        CannotRun: it cannot be sent to as it is set up, or from here.
    """
    with map_errors(schema):
        endpoint_id = await connection.fetchval(FIND_ID, name)
        found = [] if endpoint_id is None else await read(connection, [endpoint_id], vault)
        if not found:
            raise await endpoint_not_found(connection, name)
    if found[0].problem is not None:
        raise CannotRun(f'endpoint "{name}": {found[0].problem}')
    return found[0]


def _endpoint(row: Any, vault: Vault) -> Endpoint:
    """An endpoint; one that is set up wrongly must not keep the others waiting."""
    retry, retryable, problem = STANDARD, RETRYABLE, None
    secrets: tuple[tuple[SigningKey, float | None], ...] = ()
    endpoint_id, own, identity = row["id"], {}, None
    timeouts = (row["connect_timeout_s"], row["total_timeout_s"])
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    try:
        retry = _policy(row["retry"])
        if row["retryable"] is not None:
            retryable = http_status.parse(row["retryable"])
        secrets = tuple(
            (parse_signing_key(vault.open(text, endpoint_id, SIGNING)), at and at.timestamp())
            for text, at in row["secrets"]
        )
        if not secrets:
            raise UsageError("secret: there is none to sign with")
        if not all(0 < t <= TIMEOUT_S_MAX for t in timeouts):
            raise UsageError(f"time-outs: must be more than 0 and at most {TIMEOUT_S_MAX} s")
        networks = tuple(map(ip_network, row["allow_networks"]))
        stored = orjson.loads(row["headers"])
        if not isinstance(stored, dict):
            raise UsageError("headers: are not names with values")
        own = vault.open_headers(stored, endpoint_id)
        for locked in locked_values(own):
            raise Locked(locked.why)
        if row["identity"] is not None:
            identity = vault.open(row["identity"], endpoint_id, IDENTITY)
    except (Locked, UsageError, TypeError, ValueError) as error:
        problem = str(error)
    return Endpoint(
        id=endpoint_id,
        name=row["name"],
        tenant=row["tenant"],
        state=row["state"],
        url=row["url"],
        method=row["method"],
        headers=headers.own(own),
        secrets=secrets,
        connect_timeout_s=timeouts[0],
        total_timeout_s=timeouts[1],
        in_flight_max=row["in_flight_max"],
        rate_per_s=row["rate_per_s"],
        batch_max=row["batch_max"],
        networks=networks,
        ca=row["ca"],
        identity=identity,
        retry=retry,
        retryable=retryable,
        blocks=row["on_dead_letter"] == "block",
        backlog_count_max=row["backlog_count_max"],
        backlog_age_max_s=row["backlog_age_max_s"],
        disable_after_s=row["disable_after_s"],
        checkpoint_every_s=row["checkpoint_every_s"],
        generation=row["generation"],
        resumes=row["resumes"],
        obeyed=row["obeyed"],
        health=HealthRecord(
            State(row["health"]),
            row["since"].timestamp(),
            _seconds(row["held_until"]),
            row["last_answer"] and orjson.loads(row["last_answer"]),
        ),
        told=Told(_seconds(row["told_held_since"]), _seconds(row["told_stalled_at"])),
        problem=problem,
    )


@lru_cache(256)
def _policy(text: str) -> RetryPolicy:
    """Most endpoints have one of a few."""
    return RetryPolicy.from_dict(orjson.loads(text))


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


async def endpoint_not_found(connection: Connection[Any], name: str) -> NotFound:
    """The error for a name that no endpoint has, with the nearest one."""
    names = [row["name"] for row in await connection.fetch(LIST_NAMES)]
    near = difflib.get_close_matches(name, names, 1)
    hint = f'did you mean "{near[0]}"?' if near else "see: outbox endpoint list"
    return NotFound(f'there is no endpoint "{name}"; {hint}')
