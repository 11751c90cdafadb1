"""Endpoint changes: add an endpoint, and update its settings.

Each is planned by reading and written in one message (see `outbox.store.change`), with a journal
entry without header values, which may be credentials.  `plan_addition` and `plan_update` are
shared with `outbox apply`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg

from outbox.core.model import endpoint_config
from outbox.core.model.compat import format_until
from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_settings import WARNED_OF
from outbox.core.sequencing.partition_window import unsequenced_ids
from outbox.destinations.brokers import is_same_stream
from outbox.errors import Conflict, UsageError
from outbox.operations.endpoints import writes as endpoint_writes
from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.endpoints.live_secrets import (
    DELETE_COMPAT_SECRETS,
    LiveSecrets,
    new_secret,
    public_key,
    stored_compat_secret,
    stored_secret,
)
from outbox.operations.feeds.starts import begin_feed, count_after, resolve_start
from outbox.operations.lane_backlogs import PendingAhead, read_ahead
from outbox.store.change import make_change
from outbox.store.connection.secrets import CLEAR, COMPAT, SIGNING
from outbox.store.routing_change import READ_NOW

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.compat import Compat
    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.core.model.secret_text import GivenSecret
    from outbox.core.model.start import Start
    from outbox.operations.endpoints.found import FoundEndpoint
    from outbox.operations.endpoints.live_secrets import PlannedSecret
    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

FIND_NAME = "SELECT state FROM endpoint WHERE name = $1 AND state <> 'removed'"

# The highest sequenced id, and the last assigned one; ids between them may be rolled back.
READ_WAITING = """
SELECT b.high, coalesce(
           pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0) AS last
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

READ_FILTERS = (
    "SELECT count(('$ ? (' || filter || ')')::jsonpath) FROM unnest($1::text[]) AS filter"
)


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """A new endpoint, with its signing secret (shown once) or its public key (`whpk_…`)."""

    id: UUID
    name: str
    url: str
    secret: str | None
    """The secret or the public key; null: a shared secret that was given."""
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
    secret: str | None
    """The secret, or the public key `whpk_…` of an Ed25519 key; None: a given one."""
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """A planned update of an endpoint; without changed settings there is none."""

    found: FoundEndpoint
    settings: EndpointSettings
    changed: Mapping[str, tuple[str, str]]
    row: dict[str, Any]
    secrets: tuple[PlannedSecret, ...]

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
    secret: GivenSecret | None = None,
    start: Start | None = None,
) -> NewEndpoint:
    """Add an endpoint; it receives events from the next batch on.

    Args:
        ed25519: sign deliveries with an Ed25519 private key; the receiver gets the public key.
        secret: sign deliveries with this one; None: one is generated.
        start: where it begins; it receives events from there on first.

    Raises:
        UsageError: the name is taken, or the filter or the secret is invalid.
        Conflict: something after the start is gone.
        Locked: the vault lacks the key in use.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """

    async def plan(change: Change) -> NewEndpoint:
        in_use = await vault.for_writing(change.db)
        await check_filters(change.db, [settings])
        await _require_free_name(change.db, settings.name)
        high, last = await change.db.fetchrow(READ_WAITING)
        new = await plan_addition(change, settings, in_use, ed25519=ed25519, given=secret)
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
        warnings = () if WARNED_OF.isdisjoint(planned.changed) else settings.warnings
        ahead = await read_ahead(change.db, endpoint.id) if planned.has_new_lanes else None
        return Updated(endpoint.id, settings.name, planned.changed, warnings, ahead)

    return await make_change(connection, schema, actor, plan)


async def plan_addition(
    change: Change,
    settings: EndpointSettings,
    vault: Vault,
    *,
    ed25519: bool = False,
    given: GivenSecret | None = None,
) -> Addition:
    """Plan a new endpoint; its name must be free.

    Args:
        vault: the one to write with (`Vault.for_writing`).
        given: its signing secret; None: one is generated.

    Raises:
        UsageError: a given secret is invalid, or that of the compat signature is missing, or its
            end is in the past.
    """
    if ed25519 and given is not None:
        raise UsageError("ed25519: is for a new key; a given secret says its kind")
    endpoint_id, compat = uuid4(), settings.compat
    secret = new_secret(ed25519=ed25519) if given is None else stored_secret(given, settings.url)
    sealed = None
    if compat is not None:
        await _check_end(change, compat, None)
        text = stored_compat_secret(compat, _require_secret(compat))
        sealed = vault.seal(text, endpoint_id, COMPAT)
    row = {
        **endpoint_writes.endpoint_columns(endpoint_id, settings),
        "headers": vault.seal_headers(settings.headers, endpoint_id),
        "secret": vault.seal(secret, endpoint_id, SIGNING),
        "public_key": public_key(secret),
        "compat_secret": sealed,
    }
    change.journal(
        "endpoint_added", endpoint_id, _journal_settings(settings), batch_as="from_batch"
    )
    return Addition(endpoint_id, public_key(secret) or (secret if given is None else None), row)


async def plan_update(
    change: Change,
    found: FoundEndpoint,
    settings: EndpointSettings,
    in_use: Vault | None = None,
    given: GivenSecret | None = None,
) -> Update:
    """Plan an update; its new name must be free, and its filter valid.

    Args:
        in_use: the vault to write with (`Vault.for_writing`); None: it is read if needed.
        given: the signing secret; another one than the newest replaces it, as in a rotation.

    Raises:
        UsageError: a given secret is invalid, or that of a new compat signature is missing, or its
            new end is in the past.
        Conflict: the endpoint is being removed, or has too many live secrets.
        Locked: a header or secret is new, but the vault lacks the key in use.
    """
    old = found.settings
    if found.state == "removing":
        raise Conflict(f'endpoint "{old.name}" is being removed, and cannot be changed')
    check_streams_kept(old, settings)
    changed = endpoint_config.differences(old, settings)
    planned = await _plan_secrets(change, found, settings, in_use, given)
    for each in planned:
        changed["compat.secret" if each.compat else "secret"] = "(not shown)", "another (not shown)"
    row = endpoint_writes.endpoint_columns(found.id, settings)
    if settings.headers != old.headers:
        vault = in_use or await found.vault.for_writing(change.db)
        row["headers"] = vault.seal_headers(settings.headers, found.id)
    if changed:
        data: dict[str, Any] = {"name": old.name, "changes": changed}
        if "compat" in changed:
            # Requests are rebuilt from it; the text in `changes` cannot be parsed.
            data["former"] = {"compat": old.compat and old.compat.public()}
        change.journal("endpoint_updated", found.id, data, batch_as="from_batch")
    return Update(found, settings, changed, row, planned)


async def _plan_secrets(
    change: Change,
    found: FoundEndpoint,
    settings: EndpointSettings,
    in_use: Vault | None,
    given: GivenSecret | None,
) -> tuple[PlannedSecret, ...]:
    """The given secrets that are not the newest of their kind yet."""
    texts: dict[bool, str] = {}
    if given is not None:
        texts[False] = stored_secret(given, settings.url)
    compat, old = settings.compat, found.settings.compat
    if compat is not None:
        await _check_end(change, compat, old)
        # The key of a stored secret was read from its text in the former encoding.
        is_new = old is None or old.form.secret_encoding != compat.form.secret_encoding
        if is_new or compat.secret is not None:
            texts[True] = stored_compat_secret(compat, _require_secret(compat))
    if not texts:
        return ()
    live, planned = await LiveSecrets.read(change.db, found.id), []
    for is_compat, text in texts.items():
        if not live.is_newest(text, found.vault, compat=is_compat):
            writes = in_use or await found.vault.for_writing(change.db)
            planned.append(live.plan(text, found.vault, writes, found.name, compat=is_compat))
    return tuple(planned)


async def _check_end(change: Change, compat: Compat, old: Compat | None) -> None:
    """Check that a new end is not in the past; one that was reached stays valid."""
    if (until := compat.until) is None or (old is not None and until == old.until):
        return
    if until <= await change.db.fetchval(READ_NOW):
        raise UsageError(f"compat.until: {format_until(until)} is in the past")


def _require_secret(compat: Compat) -> str:
    if compat.secret is None:
        raise UsageError("compat.secret: is missing; give the secret that the receiver checks with")
    return compat.secret


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
    """Write planned updates, which all change something."""
    endpoint_writes.update_endpoints(
        change,
        [each.row for each in updates],
        renamed=[each.found.id for each in updates if each.renames],
        with_new_lanes=[each.found.id for each in updates if each.has_new_lanes],
    )
    for each in updates:
        if each.settings.compat is None and each.found.settings.compat is not None:
            change.write(DELETE_COMPAT_SECRETS, each.found.id)
        for secret in each.secrets:
            secret.write(change)
    subscribing = [each.found for each in updates if each.subscribes]
    endpoint_writes.replace_subscriptions(change, [each.id for each in subscribing if not each.fed])
    endpoint_writes.change_feeds(change, [each.id for each in subscribing if each.fed])


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
