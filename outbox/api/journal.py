"""/v1/journal: what happened, and who did it."""

from __future__ import annotations

from outbox.api.redaction import teller
from outbox.api.request_parsing import Paging
from outbox.api.route import ID_MAX, Call, For, Page, PageOf, Route, id_cursor, paged
from outbox.operations import journal
from outbox.operations.dead_letter_filter import endpoint_ids
from outbox.operations.journal import JournalRow


class JournalQuery(Paging):
    endpoint: str | None = None
    """Only what happened to this endpoint."""


async def _list(call: Call[JournalQuery, None]) -> Page:
    query = call.query
    rows = await journal.page(
        call.db,
        call.schema,
        endpoint_ids=await endpoint_ids(call.db, query.endpoint, call.tenant),
        hands=call.tenant is None,
        limit=query.limit + 1,
        before=id_cursor(query.after, ID_MAX),
    )
    to = await teller(call)
    return paged([to.journal(row) for row in rows], query.limit, lambda row: row.id)


ROUTES = (
    Route(
        method="GET",
        path="/v1/journal",
        summary="What happened, the newest first; to a tenant only of its own endpoints",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=JournalQuery,
        answers={200: PageOf(JournalRow)},
    ),
)
