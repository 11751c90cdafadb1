"""/v1/journal: what happened, and who did it."""

from __future__ import annotations

from outbox.admin.reading import Paging
from outbox.admin.routing import ID_MAX, Call, For, Page, PageOf, Route, id_cursor, paged
from outbox.admin.telling import teller
from outbox.store import journal
from outbox.store.journal import JournalRow
from outbox.store.selection import endpoint_ids


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
