"""Endpoint changes: add an endpoint, and update its settings.

All changes run in a routing transaction, which locks the cursor row (see `routing_change`), and
write a journal entry, without header values, which may be credentials.  Functions with the
suffix `_in` run in the caller's routing transaction.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import orjson

from outbox.core.delivery.ed25519 import KEY_BYTES, format_private_key
from outbox.core.delivery.signature import format_secret, parse_signing_key
from outbox.core.model import endpoint_config
from outbox.core.model.endpoint import EndpointSettings
from outbox.core.sequencing.partition_window import unsequenced_ids
from outbox.errors import Conflict, UsageError
from outbox.operations.endpoints import SETTINGS, settings_of
from outbox.store.connection.secrets import CLEAR, SIGNING
from outbox.store.endpoints import endpoint_not_found
from outbox.store.routing_change import END_SUBSCRIPTION, routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint_config import SettingDifference
    from outbox.store.connection.secrets import Vault

SECRET_BYTES = 32

# Under the cursor lock, so no other session can take the name concurrently.
FIND_NAME = "SELECT id, state FROM endpoint WHERE name = $1 AND state <> 'removed'"

# The highest sequenced id, and the last assigned one; ids between them may be rolled back.
READ_WAITING = """
SELECT b.high, coalesce(
           pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0) AS last
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

# Each setting is a column of the same name; $1 is the endpoint's id, $2 the actor or
# generation.
_COLUMNS = [each.name for each in fields(EndpointSettings)]
_VALUES = [
    f"${i}::text::jsonb" if name in ("headers", "retry") else f"${i}"
    for i, name in enumerate(_COLUMNS, start=3)
]

ADD_ENDPOINT = f"""
INSERT INTO endpoint (id, state_by, {", ".join(_COLUMNS)})
VALUES ($1, $2, {", ".join(_VALUES)})
"""  # noqa: S608 (constants only)

UPDATE_ENDPOINT = f"""
UPDATE endpoint
   SET generation = $2, {", ".join(map(" = ".join, zip(_COLUMNS, _VALUES, strict=True)))}
 WHERE id = $1
"""  # noqa: S608 (constants only)

ADD_SECRET = """
INSERT INTO endpoint_secret (endpoint_id, id, secret, public_key)
SELECT $1, coalesce(max(id), 0) + 1, $2, $3 FROM endpoint_secret WHERE endpoint_id = $1
RETURNING id
"""  # noqa: S105

# A subscription version that no batch used is deleted; it would conflict with the next one.
DROP_UNUSED_SUBSCRIPTION = "DELETE FROM subscription WHERE endpoint_id = $1 AND from_batch = $2"

ADD_SUBSCRIPTION = """
INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants, filter)
VALUES ($1, $2, $3, $4, $5, $6)
"""

NEXT_GENERATION = "SELECT next_generation($1)"

# A relay that acquires the endpoint waits for this lock, so the epoch is still current when the
# new lanes become visible.
LOCK_EPOCH = "SELECT epoch FROM ownership WHERE endpoint_id = $1 FOR NO KEY UPDATE"

# Lanes with their counters and progress.  No delivery before the first batch can be pending, so
# reads skip older partitions.
ADD_LANES = """
WITH added AS (
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT $1, $2, slot FROM generate_series(0, $3 - 1) AS slot
    RETURNING id),
counted AS (
    INSERT INTO lane_counter (lane_id) SELECT id FROM added)
INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch, epoch)
SELECT id, $1, $4, $5 FROM added
"""

ADD_HEALTH = "INSERT INTO endpoint_health (endpoint_id) VALUES ($1)"

# Unowned: any replica can acquire it.
ADD_OWNERSHIP = "INSERT INTO ownership (endpoint_id) VALUES ($1)"

# FOR NO KEY UPDATE: excludes other changes of the endpoint, but not new dead letters, whose
# foreign key refers to it.
LOCK_ENDPOINT = f"""
SELECT e.id, e.state, e.generation, {SETTINGS},
       EXISTS (SELECT FROM subscription s
                WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) AS subscribed
  FROM endpoint e WHERE e.name = $1 AND e.state <> 'removed' FOR NO KEY UPDATE OF e
"""  # noqa: S608 (constants only)

READ_FILTER = "SELECT ('$ ? (' || $1::text || ')')::jsonpath::text"


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """A new endpoint, with its signing secret, shown only now, or its public key (`whpk_…`)."""

    id: UUID
    name: str
    url: str
    secret: str
    lanes: int
    types: tuple[str, ...]
    from_batch: int
    waiting: int
    """Upper bound of events that are not sequenced yet, which the endpoint receives."""


@dataclass(frozen=True, slots=True)
class LockedEndpoint:
    """An endpoint, locked by the current transaction."""

    id: UUID
    name: str
    state: str
    generation: int
    subscribed: bool
    row: Any
    vault: Vault

    @classmethod
    def from_row(cls, row: Any, vault: Vault) -> LockedEndpoint:
        """Build from a row with these columns and those of SETTINGS."""
        known = (row["id"], row["name"], row["state"], row["generation"], row["subscribed"])
        return cls(*known, row, vault)

    @property
    def settings(self) -> EndpointSettings:
        """Parsed on access: an endpoint with unreadable settings can still be removed."""
        return settings_of(self.row, self.vault)


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of an update; without differences nothing was changed."""

    id: UUID
    name: str
    differences: tuple[SettingDifference, ...]


async def add(
    connection: Connection[Any],
    schema: str,
    settings: EndpointSettings,
    *,
    actor: str,
    vault: Vault = CLEAR,
    ed25519: bool = False,
) -> NewEndpoint:
    """Add an endpoint; it receives events from the next batch on.

    Args:
        ed25519: sign deliveries with an Ed25519 private key; the receiver gets the public key.

    Raises:
        UsageError: the name is taken, or the filter is invalid.
        Locked: the vault lacks the key in use.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    async with routing_transaction(connection, schema) as from_batch:
        return await add_in(connection, from_batch, settings, actor, vault, ed25519=ed25519)


async def update(
    connection: Connection[Any],
    schema: str,
    name: str,
    edit: Callable[[EndpointSettings], EndpointSettings],
    *,
    actor: str,
    vault: Vault = CLEAR,
) -> Updated:
    """Update settings; a renamed endpoint keeps its id.

    Args:
        edit: returns the new settings for the current ones.

    Raises:
        NotFound: no endpoint has this name.
        UsageError: a setting is invalid, the new name is taken, or the endpoint is being
            removed.
        Locked: a header is new, but the vault lacks the key in use.
    """
    async with routing_transaction(connection, schema) as from_batch:
        found = await lock_endpoint(connection, name, vault)
        return await update_in(connection, from_batch, found, edit(found.settings), actor)


async def add_in(
    connection: Connection[Any],
    from_batch: int,
    settings: EndpointSettings,
    actor: str,
    vault: Vault = CLEAR,
    *,
    ed25519: bool = False,
) -> NewEndpoint:
    """Add an endpoint in the caller's routing transaction; see `add`."""
    vault = await vault.for_writing(connection)
    await check_filter(connection, settings)
    await _require_free_name(connection, settings.name)
    ids = await connection.fetchrow(READ_WAITING)
    secret = new_secret(ed25519=ed25519)
    endpoint_id = uuid4()
    headers = vault.seal_headers(settings.headers, endpoint_id)
    await connection.execute(ADD_ENDPOINT, endpoint_id, actor, *_columns(settings, headers))
    sealed = vault.seal(secret, endpoint_id, SIGNING)
    await connection.execute(ADD_SECRET, endpoint_id, sealed, public_key(secret))
    await begin_subscription(connection, from_batch, endpoint_id, settings)
    await connection.execute(ADD_LANES, endpoint_id, 1, settings.lanes, from_batch, 0)
    await connection.execute(ADD_HEALTH, endpoint_id)
    await connection.execute(ADD_OWNERSHIP, endpoint_id)
    data = {**_journal_settings(settings), "from_batch": from_batch}
    await write_journal(connection, "endpoint_added", actor, endpoint_id, data)
    return NewEndpoint(
        id=endpoint_id,
        name=settings.name,
        url=settings.url,
        secret=public_key(secret) or secret,
        lanes=settings.lanes,
        types=settings.types,
        from_batch=from_batch,
        waiting=unsequenced_ids(ids["high"], ids["last"]),
    )


async def update_in(
    connection: Connection[Any],
    from_batch: int,
    found: LockedEndpoint,
    settings: EndpointSettings,
    actor: str,
) -> Updated:
    """Update an endpoint in the caller's routing transaction; see `update`."""
    old = found.settings
    if found.state == "removing":
        raise Conflict(f'endpoint "{old.name}" is being removed, and cannot be changed')
    differences = tuple(endpoint_config.differences(old, settings))
    if not differences:
        return Updated(found.id, settings.name, ())
    await check_filter(connection, settings)
    if settings.name != old.name:
        await _require_free_name(connection, settings.name)
    generation = found.generation
    if settings.lanes != old.lanes:
        # Existing lanes receive nothing from this batch on; the owner delivers the lanes of the
        # new generation when the old ones are drained.
        generation = await connection.fetchval(NEXT_GENERATION, generation)
        epoch = await connection.fetchval(LOCK_EPOCH, found.id)
        await connection.execute(ADD_LANES, found.id, generation, settings.lanes, from_batch, epoch)
    # An endpoint without a subscription uses the new settings when it is enabled.
    if found.subscribed and settings.subscription != old.subscription:
        await begin_subscription(connection, from_batch, found.id, settings)
    headers = orjson.loads(found.row["headers"])
    if settings.headers != old.headers:
        vault = await found.vault.for_writing(connection)
        headers = vault.seal_headers(settings.headers, found.id)
    await connection.execute(UPDATE_ENDPOINT, found.id, generation, *_columns(settings, headers))
    data = {
        "name": old.name,
        "changes": {each.setting: [each.old, each.new] for each in differences},
        "from_batch": from_batch,
    }
    await write_journal(connection, "endpoint_updated", actor, found.id, data)
    return Updated(found.id, settings.name, differences)


async def lock_endpoint(
    connection: Connection[Any], name: str, vault: Vault = CLEAR
) -> LockedEndpoint:
    """Lock an endpoint by name until the end of the transaction.

    Raises:
        NotFound: no endpoint has this name.
    """
    row = await connection.fetchrow(LOCK_ENDPOINT, name)
    if row is None:
        raise await endpoint_not_found(connection, name)
    return LockedEndpoint.from_row(row, vault)


async def begin_subscription(
    connection: Connection[Any], from_batch: int, endpoint_id: UUID, settings: EndpointSettings
) -> None:
    """Replace the subscription of an endpoint by a new version, valid from a batch on."""
    await connection.execute(DROP_UNUSED_SUBSCRIPTION, endpoint_id, from_batch)
    await connection.execute(END_SUBSCRIPTION, endpoint_id, from_batch)
    await connection.execute(ADD_SUBSCRIPTION, endpoint_id, from_batch, *settings.subscription)


async def check_filter(connection: Connection[Any], settings: EndpointSettings) -> None:
    """Validate a filter by the database, which knows the SQL/JSON path syntax of its version.

    Raises:
        UsageError: the filter is invalid.
    """
    if settings.filter is None:
        return
    try:
        await connection.fetchval(READ_FILTER, settings.filter)
    except (asyncpg.DataError, asyncpg.PostgresSyntaxError) as error:
        why = str(error).partition("\n")[0].replace(" of jsonpath input", "")
        raise UsageError(f"filter: invalid SQL/JSON path: {why}") from None


def new_secret(*, ed25519: bool = False) -> str:
    """Generate a signing secret, `whsec_…`, or an Ed25519 private key, `whsk_…`."""
    if ed25519:
        return format_private_key(secrets.token_bytes(KEY_BYTES))
    return format_secret(secrets.token_bytes(SECRET_BYTES))


def public_key(secret: str) -> str | None:
    """The public key of an Ed25519 private key, `whpk_…`; None for a symmetric secret."""
    key = parse_signing_key(secret)
    return None if isinstance(key, bytes) else key.public_text


def name_taken(name: str, state: str) -> Conflict:
    """The error for a name that is in use."""
    if state == "removing":
        return Conflict(
            f'endpoint "{name}" is being removed; its name is available when the removal is '
            "complete"
        )
    return Conflict(f'endpoint "{name}" exists already; choose another name, or remove it first')


async def _require_free_name(connection: Connection[Any], name: str) -> None:
    row = await connection.fetchrow(FIND_NAME, name)
    if row is not None:
        raise name_taken(name, row["state"])


def _columns(settings: EndpointSettings, headers: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of _COLUMNS, with the stored form of headers."""
    for name in _COLUMNS:
        held = getattr(settings, name)
        if name == "headers":
            yield orjson.dumps(headers).decode()
        elif name == "retry":
            yield orjson.dumps(held.to_dict()).decode()
        else:
            yield list(held) if isinstance(held, tuple) else held


def _journal_settings(settings: EndpointSettings) -> dict[str, Any]:
    data = endpoint_config.to_file_values(settings)
    if settings.headers:
        data["headers"] = sorted(settings.headers)
    return data
