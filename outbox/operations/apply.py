"""Endpoints as a file declares them: what has to change, and changing it.

A plan is made twice: once to look, which is all that a dry run does, and once
more under the cursor row, in the transaction that carries it out.  All of it
happens or none, and where nothing is to change, nothing is touched.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from outbox.core.model import endpoint_config
from outbox.errors import Conflict, NotFound, UsageError
from outbox.operations.endpoint_changes import (
    LOCK_EPOCH,
    Found,
    add_in,
    check_filter,
    name_taken,
    update_in,
)
from outbox.operations.endpoint_removal import COUNT_OWED, StillOwed, remove_in
from outbox.operations.endpoints import SETTINGS
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import CLEAR
from outbox.store.routing_change import change

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint import EndpointSettings
    from outbox.core.model.endpoint_config import Declared, Difference
    from outbox.store.connection.secrets import Vault

Action = Literal["add", "change", "remove", "keep"]

READ_ALL = f"""
SELECT e.id, e.state, e.generation, {SETTINGS},
       EXISTS (SELECT FROM subscription s
                WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) AS subscribed
  FROM endpoint e WHERE e.state <> 'removed' ORDER BY e.name COLLATE "C"
"""  # noqa: S608 (constants only)

LOCK_ALL = " FOR NO KEY UPDATE OF e"

# Names may change places; so all of them are given up before one is taken.
FREE_NAME = "UPDATE endpoint SET name = id::text WHERE id = $1"


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one endpoint."""

    action: Action
    name: str
    """As it is called now, or, when it is added, will be."""
    id: UUID | None
    differences: tuple[Difference, ...] = ()
    owed: int = 0
    """What is given up with it, when it is removed."""
    secret: str | None = None
    """Of a new one, shown this once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done, or in a dry run would be."""

    steps: tuple[Step, ...]
    others: tuple[str, ...]
    """Endpoints that are not in the file, and stay as they are."""

    @property
    def changes(self) -> int:
        """How many endpoints are not as they were."""
        return sum(step.action != "keep" for step in self.steps)


@dataclass(frozen=True, slots=True)
class _Work:
    """A step, and what it is done with."""

    step: Step
    place: str
    found: Found | None
    settings: EndpointSettings | None


async def apply(
    connection: Connection[Any],
    schema: str,
    declared: Sequence[Declared],
    *,
    actor: str,
    prune: bool = False,
    give_up: bool = False,
    dry_run: bool = False,
    vault: Vault = CLEAR,
) -> Outcome:
    """Make the endpoints what a file declares.

    Args:
        prune: remove those that are not in it.
        give_up: also those that are owed deliveries.

    Raises:
        UsageError: something of it cannot be; the message names the place in
            the file, and nothing was changed.
        Locked: a secret would be written, and those here are encrypted with a key that
            the vault has not.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            work, others = await _plan(connection, declared, vault, prune=prune, give_up=give_up)
    planned = Outcome(tuple(each.step for each in work), others)
    if dry_run or not planned.changes:
        return planned
    async with change(connection, schema) as from_batch:
        work, others = await _plan(
            connection, declared, vault, prune=prune, give_up=give_up, lock=LOCK_ALL
        )
        steps = await _carry_out(connection, from_batch, work, actor, vault, give_up=give_up)
    return Outcome(steps, others)


async def _plan(
    connection: Connection[Any],
    declared: Sequence[Declared],
    vault: Vault,
    *,
    prune: bool,
    give_up: bool,
    lock: str = "",
) -> tuple[list[_Work], tuple[str, ...]]:
    """What has to be done, removals first, and who is left alone."""
    rows = await connection.fetch(READ_ALL + lock)
    there = {row["id"]: Found.of(row, vault) for row in rows}
    matches = _match(declared, there)
    matched = {found.id for found in matches.values()}
    rest = [found for found in there.values() if found.id not in matched]
    taken = {found.name: found.state for found in rest}
    work: list[_Work] = []
    for found in rest if prune else ():
        if found.state != "removing":
            name = found.name
            owed: int = await connection.fetchval(COUNT_OWED, found.id)
            if owed and not give_up:
                raise Conflict(f"prune: {StillOwed(name, owed)}")
            # Its name is free in the same change, unless it is still owed something.
            taken[name] = "removing"
            if not owed:
                del taken[name]
            work.append(_Work(Step("remove", name, found.id, owed=owed), "prune", found, None))
    for each in declared:
        match, name = matches.get(each.place), each.settings.name
        state = match.state if match and match.state == "removing" else taken.get(name)
        if state is not None:
            raise Conflict(f"{each.place}.name: {name_taken(name, state)}")
        with _at(each.place):
            settings = each.settings_over(match.settings if match else None)
            await check_filter(connection, settings)
            step = _step(match, settings)
        work.append(_Work(step, each.place, match, settings))
    return work, () if prune else tuple(found.name for found in rest)


def _match(declared: Sequence[Declared], there: Mapping[UUID, Found]) -> dict[str, Found]:
    """The endpoint that each place of the file means: by its id, else by its name."""
    matches: dict[str, Found] = {}
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


def _step(found: Found | None, settings: EndpointSettings) -> Step:
    if found is None:
        return Step("add", settings.name, None)
    differences = tuple(endpoint_config.differences(found.settings, settings))
    return Step("change" if differences else "keep", found.name, found.id, differences)


async def _carry_out(
    connection: Connection[Any],
    from_batch: int,
    work: Sequence[_Work],
    actor: str,
    vault: Vault,
    *,
    give_up: bool,
) -> tuple[Step, ...]:
    for each in work:
        if each.found and each.settings and each.settings.name != each.found.name:
            await connection.execute(FREE_NAME, each.found.id)
    # In the order in which a relay locks them that takes or frees several.
    of_new_lanes = [
        each.found.id
        for each in work
        if each.found and any(d.setting == "lanes" for d in each.step.differences)
    ]
    for endpoint_id in sorted(of_new_lanes):
        await connection.execute(LOCK_EPOCH, endpoint_id)
    steps: list[Step] = []
    for each in work:
        step, found, settings = each.step, each.found, each.settings
        with _at(each.place):
            if found is not None and settings is None:
                await remove_in(connection, from_batch, found, actor, give_up=give_up)
            elif found is not None and settings is not None:
                await update_in(connection, from_batch, found, settings, actor)
            elif settings is not None:
                made = await add_in(connection, from_batch, settings, actor, vault)
                step = replace(step, id=made.id, secret=made.secret)
        steps.append(step)
    return tuple(steps)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put the place in front of what was wrong there."""
    try:
        yield
    except UsageError as error:
        kind = Conflict if isinstance(error, Conflict) else UsageError
        raise kind(f"{place}.{error}") from None
