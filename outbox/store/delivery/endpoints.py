"""Endpoints as their owner needs them: configuration, and state of the circuit breaker."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.brokers.port import APPEND_MAX
from outbox.core.delivery.circuit_breaker import BreakerRecord, BreakerState
from outbox.core.delivery.connection_reuse import ConnectionReuse
from outbox.core.delivery.endpoint import Endpoint
from outbox.core.delivery.operational_events import ReportedState
from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.messages.signature import parse_signing_key
from outbox.core.model import headers, retryable_statuses
from outbox.core.model.delivery import epoch_seconds
from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_settings import SETTING_FIELDS, SETTINGS, TIMEOUT_S_MAX
from outbox.core.model.message_format import DEFAULT_SOURCE, MessageFormat
from outbox.core.model.response_policy import EVERY_FAILURE, RETRYABLE
from outbox.core.model.retry_policy import STANDARD, RetryPolicy
from outbox.core.model.secret_text import decode_base64
from outbox.core.model.text import did_you_mean
from outbox.errors import NotFound, UsageError
from outbox.store.connection.connect import map_errors
from outbox.store.connection.row_security import (
    require_unprotected,
    rows_hidden,
    stop_hidden,
)
from outbox.store.connection.secrets import (
    COMPAT,
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
    from outbox.core.model.compat import Compat
    from outbox.store.connection.secrets import Vault


def setting_columns(headers: str = "e.headers::text") -> str:
    """The columns of the settings, which have their names; JSON is read as text."""
    texts = {"retry": "e.retry::text", "headers": headers, "compat": "e.compat::text"}
    return ", ".join(f"{texts.get(each, f'e.{each}')} AS {each}" for each in SETTING_FIELDS)


# Configuration, secrets and circuit-breaker state of endpoints; the settings are the first columns.
READ_ENDPOINTS = f"""
SELECT {setting_columns()}, e.id, e.state, e.identity, e.generation, e.resumes, h.state AS health,
       h.resumes AS applied_resumes, h.since, h.held_until,
       h.last_response::text AS last_response, h.reported_held_since, h.reported_stalled_at,
       h.failing_reported_at, h.unsolicited_at,
       array(SELECT (s.secret, s.expires_at, s.compat) FROM endpoint_secret s
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
    retry, retryable = STANDARD, RETRYABLE
    secrets: tuple[tuple[SigningKey, float | None], ...] = ()
    endpoint_id, own, identity = row["id"], {}, None
    settings: dict[str, Any] = {name: row[name] for name in SETTING_FIELDS}
    header_prefix, source = headers.DEFAULT_PREFIX, DEFAULT_SOURCE
    compat = signer = None
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    try:
        retry = _policy(row["retry"])
        if row["retryable"] is not None:
            retryable = retryable_statuses.parse(row["retryable"])
        elif retry.refusals == "retry":
            retryable = EVERY_FAILURE
        secrets = tuple(
            [
                (parse_signing_key(vault.open(text, endpoint_id, SIGNING)), at and at.timestamp())
                for text, at, is_compat in row["secrets"]
                if not is_compat
            ]
        )
        if not secrets:
            raise UsageError("secret: there is no valid signing secret")
        if not (
            0 < row["connect_timeout_s"] <= TIMEOUT_S_MAX and 0 < row["timeout_s"] <= TIMEOUT_S_MAX
        ):
            raise UsageError(f"time-outs: must be more than 0 and at most {TIMEOUT_S_MAX} s")
        networks = tuple(map(ip_network, row["allow_networks"]))
        # In a table that was edited by hand they may hold a line break.
        header_prefix = _valid_setting("header_prefix", row["header_prefix"])
        source = _valid_setting("source", row["source"])
        stored = orjson.loads(row["headers"])
        if not isinstance(stored, dict):
            raise UsageError("headers: must be an object of names and values")
        own = vault.open_headers(stored, endpoint_id)
        for locked in unreadable_values(own):
            raise locked.error
        if row["compat"] is not None:
            compat = SETTINGS["compat"].type.parse("compat", orjson.loads(row["compat"]))
            signer = _signer(row, compat, vault)
        if row["identity"] is not None:
            identity = vault.open(row["identity"], endpoint_id, IDENTITY)
    except (UnreadableSecret, UsageError, TypeError, ValueError) as error:
        settings["problem"] = str(error)
        settings["secret_altered"] = isinstance(error, AlteredSecret)
        if isinstance(error, UnreadableSecret):
            settings["failure"] = type(error)
    settings["types"], settings["allow_networks"] = map(
        tuple, (row["types"], row["allow_networks"])
    )
    settings["headers"] = headers.valid_headers(own, header_prefix, signer)
    settings["compat"] = compat
    settings["header_prefix"], settings["source"] = header_prefix, source
    settings["retry"], settings["retryable"] = retry, retryable
    if is_stream(row["url"]):
        settings["batch_max"] = APPEND_MAX
    return Endpoint(
        **settings,
        id=endpoint_id,
        state=row["state"],
        message_format=MessageFormat(row["format"], source),
        secrets=secrets,
        networks=networks,
        identity=identity,
        blocks=row["on_dead_letter"] == "block",
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
            epoch_seconds(row["reported_held_since"]),
            epoch_seconds(row["reported_stalled_at"]),
            epoch_seconds(row["failing_reported_at"]),
        ),
        reuse=ConnectionReuse(row["keep_alive"], epoch_seconds(row["unsolicited_at"])),
    )


def _signer(row: Any, compat: Compat, vault: Vault) -> CompatSigner:
    """The signer of the compat signature."""
    keys = [
        (decode_base64(vault.open(text, row["id"], COMPAT)) or b"", at and at.timestamp())
        for text, at, is_compat in row["secrets"]
        if is_compat
    ]
    if not all(key for key, _ in keys) or not keys:
        raise UsageError("compat: there is no valid secret")
    return CompatSigner(compat, keys)


@lru_cache(256)
def _policy(text: str) -> RetryPolicy:
    """Cached: most endpoints share a few policies."""
    return RetryPolicy.from_dict(orjson.loads(text))


@lru_cache(256)
def _valid_setting(name: str, value: str) -> str:
    """Cached: most endpoints share a few values."""
    valid: str = SETTINGS[name].type.validate(name, value)
    return valid


async def endpoint_not_found(connection: Connection[Any], name: str) -> NotFound:
    """The error for an unknown endpoint name, with the closest match."""
    names = [row["name"] for row in await connection.fetch(LIST_NAMES)]
    hint = did_you_mean(name, names, "see: outbox endpoint list")
    return NotFound(f'there is no endpoint "{name}"; {hint}')
