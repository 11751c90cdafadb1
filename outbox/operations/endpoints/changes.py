"""Endpoint changes: add an endpoint, and update its settings.

Each is planned by reading and written in one message (see `outbox.store.change`), with a journal
entry without header values, which may be credentials.  `plan_addition` and `plan_update` are
shared with `outbox apply`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg

from outbox.core.messages.ed25519 import KEY_BYTES, format_private_key
from outbox.core.messages.signature import format_secret, parse_signing_key
from outbox.core.model import endpoint_config
from outbox.core.model.destination import is_stream
from outbox.core.sequencing.partition_window import unsequenced_ids
from outbox.destinations.brokers import is_same_stream
from outbox.errors import Conflict, UsageError
from outbox.operations.endpoints import writes as endpoint_writes
from outbox.operations.endpoints.queries import settings_of
from outbox.operations.endpoints.writes import REQUIRE_STATES
from outbox.operations.feeds.starts import begin_feed, count_after, resolve_start
from outbox.operations.lane_backlogs import PendingAhead, read_ahead
from outbox.operations.lanes import FED, SUBSCRIBED
from outbox.store.change import make_change
from outbox.store.connection.secrets import CLEAR, SIGNING
from outbox.store.delivery.endpoints import endpoint_not_found, setting_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.core.model.start import Start
    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

SECRET_BYTES = 32

FIND_NAME = "SELECT state FROM endpoint WHERE name = $1 AND state <> 'removed'"

# The highest sequenced id, and the last assigned one; ids between them may be rolled back.
READ_WAITING = """
SELECT b.high, coalesce(
           pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0) AS last
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

READ_ENDPOINTS = f"""
SELECT e.id, e.state, {setting_columns()},
       {SUBSCRIBED} AS subscribed, {FED} AS fed
  FROM endpoint e WHERE e.state <> 'removed'
"""  # noqa: S608 (constants only)
FIND_ENDPOINTS = f"{READ_ENDPOINTS} AND e.name = ANY ($1)"

READ_FILTERS = (
    "SELECT count(('$ ? (' || filter || ')')::jsonpath) FROM unnest($1::text[]) AS filter"
)


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """A new endpoint, with its signing secret (shown once) or its public key (`whpk_…`)."""

    id: UUID
    name: str
    url: str
    secret: str
    lanes: int
    types: tuple[str, ...]
    waiting: int | None
    """Upper bound of events that are not sequenced yet, and that the endpoint receives if they
    match; null for tenant tokens."""
    events_before: int | None
    """Events of all types that were sequenced since the start, and that it receives first if they
    match; null without a start, and for tenant tokens."""
    warnings: tuple[str, ...]
    """What receivers may refuse."""


@dataclass(frozen=True)
class FoundEndpoint:
    """An endpoint as a plan has read it."""

    id: UUID
    name: str
    state: str
    subscribed: bool
    """Whether it has a subscription, or is fed before it has one."""
    fed: bool
    row: Any
    vault: Vault

    @classmethod
    def from_row(cls, row: Any, vault: Vault) -> FoundEndpoint:
        """Build from a row with these columns and those of `setting_columns`."""
        return cls(row["id"], row["name"], row["state"], row["subscribed"], row["fed"], row, vault)

    @cached_property
    def settings(self) -> EndpointSettings:
        """Parsed on access: an endpoint with unreadable settings can still be removed."""
        return settings_of(self.row, self.vault)


@dataclass(frozen=True, slots=True)
class Updated:
    """A changed endpoint."""

    id: UUID
    name: str
    changed: Mapping[str, tuple[str, str]]
    """Old and new value by setting; empty: nothing was changed."""
    warnings: tuple[str, ...]
    """What receivers may refuse, if it is new."""
    ahead: PendingAhead | None
    """What goes first; null: the number of lanes was not changed."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A planned endpoint."""

    id: UUID
    secret: str
    """The secret, or the public key `whpk_…` of an Ed25519 key."""
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """A planned update of an endpoint; without changed settings there is none."""

    found: FoundEndpoint
    settings: EndpointSettings
    changed: Mapping[str, tuple[str, str]]
    row: dict[str, Any]

    @property
    def renames(self) -> bool:
        return self.settings.name != self.found.name

    @property
    def has_new_lanes(self) -> bool:
        return "lanes" in self.changed

    @property
    def subscribes(self) -> bool:
        """An endpoint without a subscription uses the new settings when it is enabled."""
        old = self.found.settings
        return self.found.subscribed and self.settings.subscription != old.subscription


async def add_endpoint(
    connection: Connection[Any],
    schema: str,
    settings: EndpointSettings,
    *,
    actor: str,
    vault: Vault = CLEAR,
    ed25519: bool = False,
    start: Start | None = None,
) -> NewEndpoint:
    """Add an endpoint; it receives events from the next batch on.

    Args:
        ed25519: sign deliveries with an Ed25519 private key; the receiver gets the public key.
        start: where it begins; it receives events from there on first.

    Raises:
        UsageError: the name is taken, or the filter is invalid.
        Conflict: something after the start is gone.
        Locked: the vault lacks the key in use.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """

    async def plan(change: Change) -> NewEndpoint:
        in_use = await vault.for_writing(change.db)
        await check_filters(change.db, [settings])
        await _require_free_name(change.db, settings.name)
        high, last = await change.db.fetchrow(READ_WAITING)
        new = plan_addition(change, settings, in_use, ed25519=ed25519)
        endpoint_writes.add_endpoints(change, [new.row], early=True)
        before = None
        if start is None:
            endpoint_writes.replace_subscriptions(change, [new.id])
        else:
            begins = await resolve_start(change.db, start)
            before = await count_after(change.db, begins)
            begin_feed(change, new.id, begins)
        return NewEndpoint(
            id=new.id,
            name=settings.name,
            url=settings.url,
            secret=new.secret,
            lanes=settings.lanes,
            types=settings.types,
            waiting=unsequenced_ids(high, last),
            events_before=before,
            warnings=settings.warnings,
        )

    return await make_change(connection, schema, actor, plan)


async def update_endpoint(
    connection: Connection[Any],
    schema: str,
    name: str,
    edit: Callable[[EndpointSettings], EndpointSettings],
    *,
    actor: str,
    vault: Vault = CLEAR,
    owner: str | None = None,
) -> Updated:
    """Update settings; a renamed endpoint keeps its id.

    Args:
        edit: returns the new settings for the current ones; it may be called again.
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        UsageError: a setting is invalid, the new name is taken, or the endpoint is being
            removed.
        Locked: a header is new, but the vault lacks the key in use.
    """

    async def plan(change: Change) -> Updated:
        endpoint = await find_endpoint(change, name, owner, vault)
        settings = edit(endpoint.settings)
        planned = await plan_update(change, endpoint, settings)
        if planned.changed:
            await check_filters(change.db, [settings])
            if planned.renames:
                await _require_free_name(change.db, settings.name)
            write_updates(change, [planned])
        warnings = settings.warnings if "headers" in planned.changed else ()
        ahead = None
        if planned.has_new_lanes:
            ahead = await read_ahead(change.db, endpoint.id)
        return Updated(endpoint.id, settings.name, planned.changed, warnings, ahead)

    return await make_change(connection, schema, actor, plan)


def plan_addition(
    change: Change, settings: EndpointSettings, vault: Vault, *, ed25519: bool = False
) -> Addition:
    """Plan a new endpoint; its name must be free.

    Args:
        vault: the one to write with (`Vault.for_writing`).
    """
    secret, endpoint_id = new_secret(ed25519=ed25519), uuid4()
    row = {
        **endpoint_writes.endpoint_columns(endpoint_id, settings),
        "headers": vault.seal_headers(settings.headers, endpoint_id),
        "secret": vault.seal(secret, endpoint_id, SIGNING),
        "public_key": public_key(secret),
    }
    change.journal(
        "endpoint_added", endpoint_id, _journal_settings(settings), batch_as="from_batch"
    )
    return Addition(endpoint_id, public_key(secret) or secret, row)


async def plan_update(
    change: Change,
    found: FoundEndpoint,
    settings: EndpointSettings,
    in_use: Vault | None = None,
) -> Update:
    """Plan an update; its new name must be free, and its filter valid.

    Args:
        in_use: the vault to write with (`Vault.for_writing`); None: it is read if needed.

    Raises:
        Conflict: the endpoint is being removed.
        Locked: a header is new, but the vault lacks the key in use.
    """
    old = found.settings
    if found.state == "removing":
        raise Conflict(f'endpoint "{old.name}" is being removed, and cannot be changed')
    check_streams_kept(old, settings)
    changed = endpoint_config.differences(old, settings)
    row = endpoint_writes.endpoint_columns(found.id, settings)
    if settings.headers != old.headers:
        vault = in_use or await found.vault.for_writing(change.db)
        row["headers"] = vault.seal_headers(settings.headers, found.id)
    if changed:
        data = {"name": old.name, "changes": changed}
        change.journal("endpoint_updated", found.id, data, batch_as="from_batch")
    return Update(found, settings, changed, row)


def check_streams_kept(old: EndpointSettings, new: EndpointSettings) -> None:
    """Check that a change keeps the streams of a broker.

    The lanes go on where they stand in their streams, so other streams would lack what those have.

    Raises:
        UsageError: it does not; one line with the next step.
    """
    if old.url == new.url or not (is_stream(old.url) or is_stream(new.url)):
        return
    if not is_same_stream(old.url, new.url):
        raise UsageError(
            "url: an endpoint cannot move between streams, or between a broker and HTTP, because "
            "its sequences go on; add another endpoint, and remove this one when it has delivered"
        )


def write_updates(change: Change, updates: Collection[Update]) -> None:
    """Write planned updates, which all change a setting."""
    endpoint_writes.update_endpoints(
        change,
        [each.row for each in updates],
        renamed=[each.found.id for each in updates if each.renames],
        with_new_lanes=[each.found.id for each in updates if each.has_new_lanes],
    )
    subscribing = [each.found for each in updates if each.subscribes]
    endpoint_writes.replace_subscriptions(change, [each.id for each in subscribing if not each.fed])
    endpoint_writes.change_feeds(change, [each.id for each in subscribing if each.fed])


async def find_endpoint(
    change: Change, name: str, owner: str | None = None, vault: Vault = CLEAR
) -> FoundEndpoint:
    """Find an endpoint by name; see `find_endpoints`."""
    return (await find_endpoints(change, [name], owner, vault))[0]


async def find_endpoints(
    change: Change, names: Collection[str], owner: str | None = None, vault: Vault = CLEAR
) -> list[FoundEndpoint]:
    """Find endpoints by name, each once, and require that they still have their states.

    Args:
        owner: the tenant whose endpoints are found; None: all are.

    Raises:
        NotFound: no such endpoint has one of these names.
    """
    rows = {
        row["name"]: row
        for row in await change.db.fetch(FIND_ENDPOINTS, list(names))
        if owner is None or row["tenant"] == owner
    }
    for name in names:
        if name not in rows:
            raise await endpoint_not_found(change.db, name)
    endpoints = [FoundEndpoint.from_row(rows[name], vault) for name in dict.fromkeys(names)]
    require_states(change, endpoints)
    return endpoints


def require_states(change: Change, endpoints: Collection[FoundEndpoint]) -> None:
    """Require that endpoints still have their states when this is written."""
    if endpoints:
        change.write(
            REQUIRE_STATES, [each.id for each in endpoints], [each.state for each in endpoints]
        )


async def check_filters(
    connection: Connection[Any], settings: Collection[EndpointSettings]
) -> None:
    """Validate filters by the database, which knows the SQL/JSON path syntax of its version.

    Raises:
        UsageError: a filter is invalid.
    """
    filters = list(dict.fromkeys(s.filter for s in settings if s.filter is not None))
    if not filters:
        return
    try:
        await connection.fetchval(READ_FILTERS, filters)
    except (asyncpg.DataError, asyncpg.PostgresSyntaxError) as error:
        reason = str(error).partition("\n")[0].replace(" of jsonpath input", "")
        if all(each.count("(") == each.count(")") for each in filters):
            # The one that READ_FILTERS adds.
            reason = reason.replace('at or near ")"', "at its end")
        raise UsageError(
            f"filter: invalid SQL/JSON path: {reason}; a valid one is: @.total > 100"
        ) from None


def new_secret(*, ed25519: bool = False) -> str:
    """Generate a signing secret, `whsec_…`, or an Ed25519 private key, `whsk_…`."""
    if ed25519:
        return format_private_key(secrets.token_bytes(KEY_BYTES))
    return format_secret(secrets.token_bytes(SECRET_BYTES))


def public_key(secret: str) -> str | None:
    """The public key of an Ed25519 private key, `whpk_…`; None for a symmetric secret."""
    key = parse_signing_key(secret)
    return None if isinstance(key, bytes) else key.public_text


def name_conflict(name: str, state: str) -> Conflict:
    """The error for a name that is in use."""
    if state == "removing":
        return Conflict(
            f'endpoint "{name}" is being removed; its name is available when the removal is '
            "complete"
        )
    return Conflict(f'endpoint "{name}" exists already; choose another name, or remove it first')


async def _require_free_name(connection: Connection[Any], name: str) -> None:
    state = await connection.fetchval(FIND_NAME, name)
    if state is not None:
        raise name_conflict(name, state)


def _journal_settings(settings: EndpointSettings) -> dict[str, Any]:
    data = endpoint_config.to_file_values(settings)
    if settings.headers:
        data["headers"] = sorted(settings.headers)
    return data
