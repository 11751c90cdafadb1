"""Endpoints: adding one, and changing what one is to be.

Everything here happens under the cursor row (see `changes`) and is journalled;
values of headers are not, because they may be credentials.  The functions whose
names end in `_in` are for whoever makes several changes in one transaction.
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
from outbox.core.sequencing.partition_window import waiting
from outbox.errors import Conflict, UsageError
from outbox.operations.endpoints import SETTINGS, settings_of
from outbox.store.connection.secrets import CLEAR, SIGNING
from outbox.store.endpoints import endpoint_not_found
from outbox.store.routing_change import END_SUBSCRIPTION, change, write_journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint_config import Difference
    from outbox.store.connection.secrets import Vault

SECRET_BYTES = 32

# Under the cursor row, so nobody else takes the name meanwhile.
FIND_NAME = "SELECT id, state FROM endpoint WHERE name = $1 AND state <> 'removed'"

# The highest id that a batch has seen, and the last one that was given out; some of
# those between them may be rolled back.
READ_WAITING = """
SELECT b.high, coalesce(
           pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0) AS last
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

# Every setting is a column of the same name; $1 and $2 are the endpoint's id and what else
# is written with it.
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

# A version that no batch has seen held for nothing; it would be in the way of
# the next one.
DROP_UNUSED_SUBSCRIPTION = "DELETE FROM subscription WHERE endpoint_id = $1 AND from_batch = $2"

ADD_SUBSCRIPTION = """
INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants, filter)
VALUES ($1, $2, $3, $4, $5, $6)
"""

NEXT_GENERATION = "SELECT next_generation($1)"

# Whoever claims the endpoint waits for this, so the epoch below is still the
# endpoint's when its new lanes appear.
LOCK_EPOCH = "SELECT epoch FROM ownership WHERE endpoint_id = $1 FOR NO KEY UPDATE"

# Lanes with their counters and progress.  Nothing below the first batch can be
# owed, so reads need not look at the partitions of older ones.
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

# Free to be claimed by any replica.
ADD_OWNERSHIP = "INSERT INTO ownership (endpoint_id) VALUES ($1)"

# Locked against another change of the same endpoint, and not against new dead
# letters, which refer to it.
LOCK_ENDPOINT = f"""
SELECT e.id, e.state, e.generation, {SETTINGS},
       EXISTS (SELECT FROM subscription s
                WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) AS subscribed
  FROM endpoint e WHERE e.name = $1 AND e.state <> 'removed' FOR NO KEY UPDATE OF e
"""  # noqa: S608 (constants only)

READ_FILTER = "SELECT ('$ ? (' || $1::text || ')')::jsonpath::text"


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """What `add` made; the secret is shown this once, or is the public key (`whpk_…`)."""

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
class Found:
    """An endpoint under its lock."""

    id: UUID
    name: str
    state: str
    generation: int
    subscribed: bool
    row: Any
    vault: Vault

    @classmethod
    def of(cls, row: Any, vault: Vault) -> Found:
        """From a row with these columns and those of SETTINGS."""
        known = (row["id"], row["name"], row["state"], row["generation"], row["subscribed"])
        return cls(*known, row, vault)

    @property
    def settings(self) -> EndpointSettings:
        """Read when asked for: one that cannot be read can still be removed."""
        return settings_of(self.row, self.vault)


@dataclass(frozen=True, slots=True)
class Updated:
    """What `update` changed: perhaps nothing."""

    id: UUID
    name: str
    differences: tuple[Difference, ...]


async def add(
    connection: Connection[Any],
    schema: str,
    settings: EndpointSettings,
    *,
    actor: str,
    vault: Vault = CLEAR,
    ed25519: bool = False,
) -> NewEndpoint:
    """Add an endpoint; it gets what is not sequenced yet, and everything after it.

    Args:
        ed25519: its deliveries are signed with a private key, of which the receiver is
            given the public one.

    Raises:
        UsageError: the name is taken, or the database cannot read the filter.
        Locked: secrets are encrypted here with a key that the vault has not.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    async with change(connection, schema) as from_batch:
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
    """Change settings; another name keeps the id.

    Args:
        edit: makes the new settings of those there are.

    Raises:
        NotFound: there is none of that name.
        UsageError: a setting is wrong, the new name is taken, or the endpoint
            is being removed.
        Locked: a header is new, and those here are encrypted with a key that the vault
            has not.
    """
    async with change(connection, schema) as from_batch:
        found = await lock(connection, name, vault)
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
    """`add` in a change that is under way."""
    vault = await vault.for_writing(connection)
    await check_filter(connection, settings)
    await _name_is_free(connection, settings.name)
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
    told = {**_journalled(settings), "from_batch": from_batch}
    await write_journal(connection, "endpoint_added", actor, endpoint_id, told)
    return NewEndpoint(
        id=endpoint_id,
        name=settings.name,
        url=settings.url,
        secret=public_key(secret) or secret,
        lanes=settings.lanes,
        types=settings.types,
        from_batch=from_batch,
        waiting=waiting(ids["high"], ids["last"]),
    )


async def update_in(
    connection: Connection[Any],
    from_batch: int,
    found: Found,
    settings: EndpointSettings,
    actor: str,
) -> Updated:
    """`update` in a change that is under way."""
    old = found.settings
    if found.state == "removing":
        raise Conflict(f'endpoint "{old.name}" is being removed; it cannot be changed any more')
    differences = tuple(endpoint_config.differences(old, settings))
    if not differences:
        return Updated(found.id, settings.name, ())
    await check_filter(connection, settings)
    if settings.name != old.name:
        await _name_is_free(connection, settings.name)
    generation = found.generation
    if settings.lanes != old.lanes:
        # The lanes there are get nothing from this batch on; their owner sends
        # those of the new generation when the old ones are drained.
        generation = await connection.fetchval(NEXT_GENERATION, generation)
        epoch = await connection.fetchval(LOCK_EPOCH, found.id)
        await connection.execute(ADD_LANES, found.id, generation, settings.lanes, from_batch, epoch)
    # An endpoint that gets nothing new begins with these when it is enabled.
    if found.subscribed and settings.subscription != old.subscription:
        await begin_subscription(connection, from_batch, found.id, settings)
    headers = orjson.loads(found.row["headers"])
    if settings.headers != old.headers:
        vault = await found.vault.for_writing(connection)
        headers = vault.seal_headers(settings.headers, found.id)
    await connection.execute(UPDATE_ENDPOINT, found.id, generation, *_columns(settings, headers))
    told = {
        "name": old.name,
        "changes": {each.setting: [each.old, each.new] for each in differences},
        "from_batch": from_batch,
    }
    await write_journal(connection, "endpoint_updated", actor, found.id, told)
    return Updated(found.id, settings.name, differences)


async def lock(connection: Connection[Any], name: str, vault: Vault = CLEAR) -> Found:
    """The endpoint of this name, locked for the rest of the change.

    Raises:
        NotFound: there is none.
    """
    row = await connection.fetchrow(LOCK_ENDPOINT, name)
    if row is None:
        raise await endpoint_not_found(connection, name)
    return Found.of(row, vault)


async def begin_subscription(
    connection: Connection[Any], from_batch: int, endpoint_id: UUID, settings: EndpointSettings
) -> None:
    """A new version of what an endpoint receives, in place of the one there is."""
    await connection.execute(DROP_UNUSED_SUBSCRIPTION, endpoint_id, from_batch)
    await connection.execute(END_SUBSCRIPTION, endpoint_id, from_batch)
    await connection.execute(ADD_SUBSCRIPTION, endpoint_id, from_batch, *settings.subscription)


async def check_filter(connection: Connection[Any], settings: EndpointSettings) -> None:
    """Let the database read a filter: it knows the syntax of its own version.

    Raises:
        UsageError: it cannot.
    """
    if settings.filter is None:
        return
    try:
        await connection.fetchval(READ_FILTER, settings.filter)
    except (asyncpg.DataError, asyncpg.PostgresSyntaxError) as error:
        why = str(error).partition("\n")[0].replace(" of jsonpath input", "")
        raise UsageError(f"filter: the database cannot read it: {why}") from None


def new_secret(*, ed25519: bool = False) -> str:
    """A signing secret, `whsec_…`, or a private key, `whsk_…`."""
    if ed25519:
        return format_private_key(secrets.token_bytes(KEY_BYTES))
    return format_secret(secrets.token_bytes(SECRET_BYTES))


def public_key(secret: str) -> str | None:
    """What the receiver is given of a private key, `whpk_…`; None: it has the secret itself."""
    key = parse_signing_key(secret)
    return None if isinstance(key, bytes) else key.public_text


def name_taken(name: str, state: str) -> Conflict:
    """The error for a name that another endpoint has."""
    if state == "removing":
        return Conflict(
            f'endpoint "{name}" is being removed; its name is free when a relay has finished that'
        )
    return Conflict(f'endpoint "{name}" exists already; choose another name, or remove it first')


async def _name_is_free(connection: Connection[Any], name: str) -> None:
    row = await connection.fetchrow(FIND_NAME, name)
    if row is not None:
        raise name_taken(name, row["state"])


def _columns(settings: EndpointSettings, headers: Mapping[str, Any]) -> Iterator[Any]:
    """The values of _COLUMNS, with the headers as they are stored."""
    for name in _COLUMNS:
        held = getattr(settings, name)
        if name == "headers":
            yield orjson.dumps(headers).decode()
        elif name == "retry":
            yield orjson.dumps(held.to_dict()).decode()
        else:
            yield list(held) if isinstance(held, tuple) else held


def _journalled(settings: EndpointSettings) -> dict[str, Any]:
    told = endpoint_config.write(settings)
    if settings.headers:
        told["headers"] = sorted(settings.headers)
    return told
