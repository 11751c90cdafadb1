"""/v1/erase: what events said is gone, what happened stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.api import tenancy
from outbox.api.route import Call, For, Model, Route, Shown
from outbox.errors import UsageError
from outbox.operations import erase
from outbox.operations.erase import Whose
from outbox.operations.views.erase import erased

if TYPE_CHECKING:
    from outbox.api.request_parsing import NoQuery

TIMEOUT_S = 600.0
"""It goes in steps, and what was erased stays erased: whoever is cut off says it again."""


class EraseBody(Model):
    """Whose events: of a tenant, or with a key."""

    tenant: str | None = None
    key: str | None = None
    dry_run: bool = False
    """Only count."""


class Erased(Shown):
    """What was erased, or would be."""

    dry_run: bool
    events: int
    future_events: int
    dead_letters: int
    answers: int | None
    """Of attempts; not counted beforehand."""
    schedules: tuple[str, ...]
    """Those that go on publishing such events."""


async def _erase(call: Call[NoQuery, EraseBody]) -> dict[str, Any]:
    body = call.body
    if call.tenant is not None and body.key is not None:
        raise UsageError(
            "key: others may have events with the same one; this token erases by its tenant"
        )
    whose = Whose(tenancy.forced(call.tenant, body.tenant), body.key)
    if body.dry_run:
        done = await erase.count(call.db, call.schema, whose)
    else:
        done = await erase.erase(call.db, call.schema, whose, actor=call.actor)
    return erased(done, dry_run=body.dry_run)


ROUTES = (
    Route(
        method="POST",
        path="/v1/erase",
        summary="Erase payloads, headers and answers of a tenant's or a key's events, for good",
        handler=_erase,
        scope="operate",
        tenants=For.NARROWED,
        body=EraseBody,
        timeout_s=TIMEOUT_S,
        long=True,
        answers={200: Erased},
    ),
)
