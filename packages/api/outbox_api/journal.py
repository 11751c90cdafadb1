"""/v1/journal: audit log of changes and state transitions."""

from __future__ import annotations

from outbox.operations import journal
from outbox.operations.criteria import find_endpoint_ids
from outbox.operations.journal import By, JournalFilter, JournalRow
from outbox.operations.rows import ID_MAX
from outbox_api import route
from outbox_api.field_types import Name
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import IdPaging, TimeOrAge
from outbox_api.route import (
    Call,
    Page,
    TenantAccess,
    id_cursor,
    page_of_rows,
)


class JournalQuery(IdPaging):
    endpoint: Name | None = None
    """Entries of this endpoint only."""
    kind: Name | None = None
    """Entries of this kind only, such as endpoint_paused."""
    actor: Name | None = None
    """Entries of this user, token or relay only."""
    since: TimeOrAge | None = None
    """Written at this time or later."""
    until: TimeOrAge | None = None
    """Written before this time."""
    by: By = "all"
    """`people`: without what relays do by themselves, such as taking an endpoint over; `relays`:
    only that.  Such a page may have fewer items than `limit`, or none, and `next`, because it ends
    after 20,000 entries were searched."""


@route.get(
    "/v1/journal",
    "List journal entries, newest first; a tenant sees those of its endpoints",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _list(call: Call[JournalQuery, None]) -> Page[JournalRow]:
    query = call.query
    rows = await call.run(
        journal.list_journal,
        endpoint_ids=await find_endpoint_ids(call.db, query.endpoint, call.tenant),
        ownership_changes=call.tenant is None,
        only=JournalFilter(query.kind, query.actor, query.since, query.until, query.by),
        limit=query.limit,
        before=id_cursor(query.after, ID_MAX),
    )
    redactor = await redactor_for(call)
    return page_of_rows(rows, lambda row: row.id, redactor.redact_journal_row)
