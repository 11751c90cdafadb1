"""Declarative endpoint configuration: plan and apply the changes of a file.

The plan is computed twice: first read-only, which is all that a dry run does, and again under
the cursor lock, in the transaction that applies it.  All changes are applied in one
transaction; a file without differences causes no write.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from outbox.core.model import endpoint_config
from outbox.errors import Conflict, NotFound, UsageError
from outbox.operations.endpoint_changes import (
    LOCK_EPOCH,
    LockedEndpoint,
    add_in,
    check_filter,
    name_taken,
    update_in,
)
from outbox.operations.endpoint_removal import COUNT_PENDING, StillPending, remove_in
from outbox.operations.endpoints import SETTINGS
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import CLEAR
from outbox.store.routing_change import routing_transaction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint import EndpointSettings
    from outbox.core.model.endpoint_config import DeclaredEndpoint, SettingDifference
    from outbox.store.connection.secrets import Vault

Action = Literal["add", "change", "remove", "keep"]

READ_ALL = f"""
SELECT e.id, e.state, e.generation, {SETTINGS},
       EXISTS (SELECT FROM subscription s
                WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) AS subscribed
  FROM endpoint e WHERE e.state <> 'removed' ORDER BY e.name COLLATE "C"
"""  # noqa: S608 (constants only)

LOCK_ALL = " FOR NO KEY UPDATE OF e"

# Endpoints may swap names, so all renamed endpoints first get a placeholder (their id).
FREE_NAME = "UPDATE endpoint SET name = id::text WHERE id = $1"


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """The planned or applied change of one endpoint."""

    action: Action
    name: str
    """Current name, or the new name when the endpoint is added."""
    id: UUID | None
    differences: tuple[SettingDifference, ...] = ()
    pending: int = 0
    """Pending deliveries that are dead-lettered, when the endpoint is removed."""
    secret: str | None = None
    """Signing secret of a new endpoint, shown only now."""


@dataclass(frozen=True, slots=True)
class ApplyOutcome:
    """Result of apply, or of a dry run."""

    steps: tuple[ApplyStep, ...]
    others: tuple[str, ...]
    """Endpoints that are not in the file and are kept."""

    @property
    def changes(self) -> int:
        """Number of changed endpoints."""
        return sum(step.action != "keep" for step in self.steps)


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """A step with its endpoint and settings."""

    step: ApplyStep
    place: str
    found: LockedEndpoint | None
    settings: EndpointSettings | None


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
) -> ApplyOutcome:
    """Make the endpoints match a file, in one transaction.

    Args:
        prune: remove endpoints that are not in the file.
        dead_letter: prune endpoints with pending deliveries, too, and dead-letter these.

    Raises:
        UsageError: a setting is invalid; the message names the place in the file, and nothing
            was changed.
        Locked: a secret must be written, but the vault lacks the key in use.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            work, others = await _plan(
                connection, declared, vault, prune=prune, dead_letter=dead_letter
            )
    planned = ApplyOutcome(tuple(each.step for each in work), others)
    if dry_run or not planned.changes:
        return planned
    async with routing_transaction(connection, schema) as from_batch:
        work, others = await _plan(
            connection, declared, vault, prune=prune, dead_letter=dead_letter, lock=LOCK_ALL
        )
        steps = await _carry_out(
            connection, from_batch, work, actor, vault, dead_letter=dead_letter
        )
    return ApplyOutcome(steps, others)


async def _plan(
    connection: Connection[Any],
    declared: Sequence[DeclaredEndpoint],
    vault: Vault,
    *,
    prune: bool,
    dead_letter: bool,
    lock: str = "",
) -> tuple[list[_PlannedStep], tuple[str, ...]]:
    """Plan the steps, removals first, and list the endpoints that are kept."""
    rows = await connection.fetch(READ_ALL + lock)
    there = {row["id"]: LockedEndpoint.from_row(row, vault) for row in rows}
    matches = _match_endpoints(declared, there)
    matched = {found.id for found in matches.values()}
    rest = [found for found in there.values() if found.id not in matched]
    taken = {found.name: found.state for found in rest}
    work: list[_PlannedStep] = []
    for found in rest if prune else ():
        if found.state != "removing":
            name = found.name
            pending: int = await connection.fetchval(COUNT_PENDING, found.id)
            if pending and not dead_letter:
                raise Conflict(f"prune: {StillPending(name, pending)}")
            # The name is free in the same transaction, unless deliveries are pending.
            taken[name] = "removing"
            if not pending:
                del taken[name]
            work.append(
                _PlannedStep(
                    ApplyStep("remove", name, found.id, pending=pending), "prune", found, None
                )
            )
    for each in declared:
        match, name = matches.get(each.place), each.settings.name
        state = match.state if match and match.state == "removing" else taken.get(name)
        if state is not None:
            raise Conflict(f"{each.place}.name: {name_taken(name, state)}")
        with _prefix_errors(each.place):
            settings = each.merge_over(match.settings if match else None)
            await check_filter(connection, settings)
            step = _step(match, settings)
        work.append(_PlannedStep(step, each.place, match, settings))
    return work, () if prune else tuple(found.name for found in rest)


def _match_endpoints(
    declared: Sequence[DeclaredEndpoint], there: Mapping[UUID, LockedEndpoint]
) -> dict[str, LockedEndpoint]:
    """Match each place of the file to an endpoint: by id, else by name."""
    matches: dict[str, LockedEndpoint] = {}
    for each in declared:
        if each.id is not None:
            if each.id not in there:
                raise NotFound(
                    f"{each.place}.id: there is no endpoint with the id {each.id}; leave it out "
                    "to add one"
                )
            matches[each.place] = there[each.id]
    claimed = {found.id for found in matches.values()}
    by_name = {f.name: f for f in there.values() if f.id not in claimed}
    for each in declared:
        if each.id is None and each.settings.name in by_name:
            matches[each.place] = by_name[each.settings.name]
    return matches


def _step(found: LockedEndpoint | None, settings: EndpointSettings) -> ApplyStep:
    if found is None:
        return ApplyStep("add", settings.name, None)
    differences = tuple(endpoint_config.differences(found.settings, settings))
    return ApplyStep("change" if differences else "keep", found.name, found.id, differences)


async def _carry_out(
    connection: Connection[Any],
    from_batch: int,
    work: Sequence[_PlannedStep],
    actor: str,
    vault: Vault,
    *,
    dead_letter: bool,
) -> tuple[ApplyStep, ...]:
    for each in work:
        if each.found and each.settings and each.settings.name != each.found.name:
            await connection.execute(FREE_NAME, each.found.id)
    # Lock in the order that relays use when they acquire or release several, to prevent deadlocks.
    of_new_lanes = [
        each.found.id
        for each in work
        if each.found and any(d.setting == "lanes" for d in each.step.differences)
    ]
    for endpoint_id in sorted(of_new_lanes):
        await connection.execute(LOCK_EPOCH, endpoint_id)
    steps: list[ApplyStep] = []
    for each in work:
        step, found, settings = each.step, each.found, each.settings
        with _prefix_errors(each.place):
            if found is not None and settings is None:
                await remove_in(connection, from_batch, found, actor, dead_letter=dead_letter)
            elif found is not None and settings is not None:
                await update_in(connection, from_batch, found, settings, actor)
            elif settings is not None:
                made = await add_in(connection, from_batch, settings, actor, vault)
                step = replace(step, id=made.id, secret=made.secret)
        steps.append(step)
    return tuple(steps)


@contextmanager
def _prefix_errors(place: str) -> Iterator[None]:
    """Prefix errors with their place in the file."""
    try:
        yield
    except UsageError as error:
        kind = Conflict if isinstance(error, Conflict) else UsageError
        raise kind(f"{place}.{error}") from None
