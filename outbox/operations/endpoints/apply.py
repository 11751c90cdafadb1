"""Declarative endpoint configuration: plan and apply the changes of a file.

All changes are planned by reading, which is all that a dry run does, and written in one message
(see `outbox.store.change`): all of them are applied, or none.  New endpoints are written before
the cursor row is locked, so that even thousands of them do not delay events.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_config import errors_at
from outbox.destinations.brokers import find_destination
from outbox.errors import Conflict, NotFound, UsageError
from outbox.operations.endpoints.changes import (
    check_filters,
    name_conflict,
    plan_addition,
    plan_update,
    write_updates,
)
from outbox.operations.endpoints.found import READ_ENDPOINTS, FoundEndpoint, require_states
from outbox.operations.endpoints.removal import StillPending, plan_removals
from outbox.operations.endpoints.writes import SET_STATES, add_endpoints, replace_subscriptions
from outbox.operations.feeds.starts import begin_feed, resolve_start
from outbox.store.change import make_change
from outbox.store.connection.secrets import CLEAR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint_config import DeclaredEndpoint
    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.operations.endpoints.changes import Addition, Update
    from outbox.operations.feeds.starts import FeedStart
    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

T = TypeVar("T")


Action = Literal["add", "change", "remove", "keep"]

READ_ALL = f'{READ_ENDPOINTS} ORDER BY e.name COLLATE "C"'


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """The planned or applied change of one endpoint."""

    action: Action
    name: str
    """Current name, or the new name when the endpoint is added."""
    id: UUID | None
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Old and new value by setting."""
    pending: int = 0
    """Pending deliveries that are dead-lettered with an endpoint that is removed."""
    secret: str | None = None
    """Signing secret of a new endpoint, shown only now; null if it was given."""


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """Result of applying a file, or of its dry run."""

    dry_run: bool
    changes: int
    """Number of changed endpoints."""
    endpoints: tuple[ApplyStep, ...]
    not_in_the_file: tuple[str, ...]
    """Endpoints that are not in the file and are kept."""


async def apply_file(
    connection: Connection[Any],
    schema: str,
    declared: Sequence[DeclaredEndpoint],
    *,
    actor: str,
    prune: bool = False,
    dead_letter: bool = False,
    dry_run: bool = False,
    vault: Vault = CLEAR,
) -> ApplyReport:
    """Make the endpoints match a file: all of them, or none.

    Args:
        prune: remove endpoints that are not in the file.
        dead_letter: prune endpoints with pending deliveries, too, and dead-letter these.

    Raises:
        UsageError: a setting is invalid; the message names the place in the file, and nothing
            was changed.
        Locked: a secret must be written, but the vault lacks the key in use.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """

    async def plan(change: Change) -> ApplyReport:
        steps, kept = await _plan(change, declared, vault, prune=prune, dead_letter=dead_letter)
        if dry_run:
            change.discard()
            steps = list(map(_without_secret, steps))
        changes = sum(step.action != "keep" for step in steps)
        return ApplyReport(dry_run, changes, tuple(steps), kept)

    return await make_change(connection, schema, actor, plan)


def _without_secret(step: ApplyStep) -> ApplyStep:
    """The step of a dry run: a new endpoint will have another id and secret."""
    return replace(step, id=None, secret=None) if step.action == "add" else step


async def _plan(
    change: Change,
    declared: Sequence[DeclaredEndpoint],
    vault: Vault,
    *,
    prune: bool,
    dead_letter: bool,
) -> tuple[list[ApplyStep], tuple[str, ...]]:
    """Plan the steps, removals first; returns them, and the endpoints that are not in the file."""
    rows = await change.db.fetch(READ_ALL)
    existing = {row["id"]: FoundEndpoint.from_row(row, vault) for row in rows}
    matches = _match_endpoints(declared, existing)
    matched = {endpoint.id for endpoint in matches.values()}
    rest = [endpoint for endpoint in existing.values() if endpoint.id not in matched]
    pruned = [endpoint for endpoint in rest if prune and endpoint.state != "removing"]
    require_states(change, pruned)
    try:
        removals = await plan_removals(change, pruned, dead_letter=dead_letter)
    except StillPending as error:
        raise Conflict(f"prune: {error}") from None
    # A name is free in the same message, unless deliveries are pending.
    kept = {r.id: r.state for r in removals if r.state == "removing"}
    taken = {
        endpoint.name: kept.get(endpoint.id, endpoint.state)
        for endpoint in rest
        if endpoint.id in kept or endpoint not in pruned
    }
    settings = _merge_settings(declared, matches, taken)
    await _check_filters(change, declared, settings)
    steps = [ApplyStep("remove", r.name, r.id, pending=r.pending) for r in removals]
    steps += await _plan_changes(change, declared, matches, settings, existing, vault)
    return steps, () if prune else tuple(endpoint.name for endpoint in rest)


def _merge_settings(
    declared: Sequence[DeclaredEndpoint],
    matches: Mapping[str, FoundEndpoint],
    taken: Mapping[str, str],
) -> list[EndpointSettings]:
    """The new settings of each place of the file.

    Args:
        taken: names that are in use by other endpoints, with their state.
    """
    merged = []
    for each in declared:
        match, name = matches.get(each.place), each.settings.name
        state = match.state if match and match.state == "removing" else taken.get(name)
        if state is not None:
            raise Conflict(f"{each.place}.name: {name_conflict(name, state)}")
        with errors_at(each.place):
            merged.append(each.merge_over(match.settings if match else None))
    return merged


async def _check_filters(
    change: Change, declared: Sequence[DeclaredEndpoint], settings: Sequence[EndpointSettings]
) -> None:
    """Check all filters at once, and find the invalid one only if there is one."""
    try:
        await check_filters(change.db, settings)
    except UsageError:
        for each, its in zip(declared, settings, strict=True):
            with errors_at(each.place):
                await check_filters(change.db, [its])


async def _plan_changes(
    change: Change,
    declared: Sequence[DeclaredEndpoint],
    matches: Mapping[str, FoundEndpoint],
    settings: Sequence[EndpointSettings],
    existing: Mapping[UUID, FoundEndpoint],
    vault: Vault,
) -> list[ApplyStep]:
    """Plan additions and updates."""
    steps: list[ApplyStep] = []
    additions: list[Addition] = []
    starts: list[tuple[UUID, FeedStart]] = []
    disabled: dict[UUID, str] = {}
    updates: list[Update] = []
    writes_secrets = any(
        each.place not in matches
        or each.secret is not None
        or its.headers != matches[each.place].settings.headers
        or (its.compat is not None and its.compat.secret is not None)
        for each, its in zip(declared, settings, strict=True)
    )
    in_use = await vault.for_writing(change.db) if writes_secrets else vault
    for each, its in zip(declared, settings, strict=True):
        match = matches.get(each.place)
        if match is None:
            with errors_at(each.place):
                if is_stream(its.url):
                    find_destination(its.url)
                new = await plan_addition(change, its, in_use, given=each.secret)
            additions.append(new)
            if each.disabled:
                disabled[new.id] = its.name
            if each.start is not None:
                with errors_at(each.place):
                    starts.append((new.id, await resolve_start(change.db, each.start)))
            steps.append(ApplyStep("add", its.name, new.id, secret=new.secret))
            continue
        with errors_at(each.place):
            update = await plan_update(change, match, its, in_use, each.secret)
        if update.changed:
            updates.append(update)
        action: Action = "change" if update.changed else "keep"
        steps.append(ApplyStep(action, match.name, match.id, update.changed))
    require_states(change, [each.found for each in updates])
    # A name that is freed by this change is not free before.
    names = {endpoint.name for endpoint in existing.values()}
    early = [each.row for each in additions if each.row["name"] not in names]
    late = [each.row for each in additions if each.row["name"] in names]
    add_endpoints(change, early, early=True)
    write_updates(change, updates)
    add_endpoints(change, late)
    begun = {endpoint_id for endpoint_id, _ in starts} | disabled.keys()
    replace_subscriptions(change, [each.id for each in additions if each.id not in begun])
    for endpoint_id, start in starts:
        begin_feed(change, endpoint_id, start)
    if disabled:
        change.write(SET_STATES, list(disabled), "disabled", change.actor, None)
    for endpoint_id, name in disabled.items():
        change.journal("endpoint_disabled", endpoint_id, {"name": name})
    return steps


def _match_endpoints(
    declared: Sequence[DeclaredEndpoint], existing: Mapping[UUID, FoundEndpoint]
) -> dict[str, FoundEndpoint]:
    """Match each place of the file to an endpoint: by id, else by name."""
    matches: dict[str, FoundEndpoint] = {}
    for each in declared:
        if each.id is not None:
            if each.id not in existing:
                raise NotFound(
                    f"{each.place}.id: there is no endpoint with the id {each.id}; leave it out "
                    "to add one"
                )
            matches[each.place] = existing[each.id]
    claimed = {endpoint.id for endpoint in matches.values()}
    by_name = {f.name: f for f in existing.values() if f.id not in claimed}
    for each in declared:
        if each.id is None and each.settings.name in by_name:
            matches[each.place] = by_name[each.settings.name]
    return matches
