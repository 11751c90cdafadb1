"""/v1/declaration: all endpoints as a file declares them."""

from __future__ import annotations

from typing import Any

from outbox.api.request_parsing import Paging
from outbox.api.route import Call, Model, Page, PageOf, Route, Shown
from outbox.core.model import endpoint_config
from outbox.destinations.http.endpoint_validation import aside, check_declared, policy_of
from outbox.errors import UsageError
from outbox.operations import endpoints
from outbox.operations.apply import Action, apply
from outbox.operations.views.endpoints import applied
from outbox.store.connection.secrets import Vault


class ApplyQuery(Model):
    dry_run: bool = False
    """Say what would be done, and do nothing."""
    prune: bool = False
    """Remove endpoints that are not in it."""
    give_up: bool = False
    """With prune: also those that are owed deliveries."""


class Declaration(Model):
    """Endpoints as a file for `outbox apply` declares them; what is not said is the default."""

    defaults: dict[str, Any] | None = None
    endpoints: tuple[dict[str, Any], ...]


class Step(Shown):
    """What became of one endpoint."""

    action: Action
    name: str
    id: Any
    """None of one that would be added."""
    changed: dict[str, list[str]] | None = None
    owed: int | None = None
    """What is given up with it."""
    secret: str | None = None
    """Of a new one, shown this once."""


class Applied(Shown):
    """What was done, or in a dry run would be."""

    dry_run: bool
    changes: int
    endpoints: list[Step]
    not_in_the_file: tuple[str, ...]


async def _export(call: Call[Paging, None]) -> Page:
    limit = call.query.limit
    rows = await endpoints.settings_page(
        call.db, call.schema, limit=limit + 1, after=call.query.after
    )
    told = [{"id": id_, **endpoint_config.write(each)} for id_, each in rows[:limit]]
    more = len(rows) > limit
    return Page(told, rows[limit - 1][1].name if more else None)


async def _apply(call: Call[ApplyQuery, Declaration]) -> dict[str, Any]:
    query = call.query
    if query.give_up and not query.prune:
        raise UsageError("give_up is about what prune removes; say both")
    said = call.body.model_dump()
    declared = endpoint_config.read({**said, "endpoints": list(said["endpoints"])})
    policy = policy_of(call.settings)
    await aside(check_declared, declared, policy)
    outcome = await apply(
        call.db,
        call.schema,
        declared,
        actor=call.actor,
        prune=query.prune,
        give_up=query.give_up,
        dry_run=query.dry_run,
        vault=Vault.of(call.settings),
    )
    return applied(outcome, dry_run=query.dry_run)


ROUTES = (
    Route(
        method="GET",
        path="/v1/declaration",
        summary="All endpoints as a file declares them, headers without their values",
        handler=_export,
        scope="operate",
        query=Paging,
        answers={200: PageOf(dict[str, Any])},
    ),
    Route(
        method="PUT",
        path="/v1/declaration",
        summary="Make the endpoints what is declared: all of it, or nothing",
        handler=_apply,
        scope="operate",
        query=ApplyQuery,
        body=Declaration,
        answers={200: Applied},
    ),
)
