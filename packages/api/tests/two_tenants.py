"""Two tenants with the same history, and rows without a tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox_api.tenancy import stored_key
from tests.support.relay import (
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

# Everything of the other tenant, or without a tenant, as one value.
ACME_ONCE = stored_key("acme", "")
THEIRS = f"""
SELECT md5(concat_ws('|',
    (SELECT string_agg(e::text, '' ORDER BY id) FROM endpoint e
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(s::text, '' ORDER BY s.endpoint_id, s.id) FROM endpoint_secret s
       JOIN endpoint e ON e.id = s.endpoint_id WHERE e.tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(o::text, '' ORDER BY id) FROM outbox o
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(d::text, '' ORDER BY d.id) FROM dead_letter d
       JOIN endpoint e ON e.id = d.endpoint_id WHERE e.tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(s::text, '' ORDER BY id) FROM schedule s
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(f::text, '' ORDER BY id) FROM future_event f
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(o::text, '' ORDER BY key) FROM idempotency_key o
      WHERE NOT starts_with(key, '{ACME_ONCE}')),
    (SELECT string_agg(j::text, '' ORDER BY id) FROM replay_job j
      WHERE EXISTS (SELECT FROM replay_job_endpoint p JOIN endpoint e ON e.id = p.endpoint_id
                     WHERE p.job_id = j.id AND e.tenant IS DISTINCT FROM 'acme')),
    (SELECT string_agg(t::text, '' ORDER BY name) FROM
            (SELECT name, scopes, tenant, revoked_at FROM token) t)))
"""


class World:
    """Two tenants, and rows without one; every row that is not acme's contains "globex"."""

    def __init__(self, database: Database, everything: Api, acme: Api) -> None:
        self.database = database
        self.everything = everything
        self.acme = acme
        self.ids: dict[str, dict[str, Any]] = {}

    async def make(self) -> None:
        for tenant in ("acme", "globex"):
            await add_endpoint(self.database, f"{tenant}-shop", tenant=tenant)
        await add_endpoint(self.database, "globex-all", all_tenants=True)
        sent: list[Any] = []

        def refuse(request: Any) -> Any:
            sent.append(request)
            return REFUSED

        async with running(self.database, Network(refuse)):
            for tenant in ("acme", "globex"):
                await publish(self.database, {"who": tenant}, key="same-key", tenant=tenant)
            await publish(self.database, {"who": "globex, or nobody"}, key="same-key")
            await all_ended(self.database)
        post = self.everything.post
        for tenant in ("acme", "globex"):
            (letter,) = await self.everything.items("/v1/dead-letters", endpoint=f"{tenant}-shop")
            await post(
                "/v1/schedules",
                {"name": f"{tenant}-nightly", "cron": "@daily", "type": "a.b", "tenant": tenant},
            )
            once = {"type": "a.b", "tenant": tenant, "once": f"{tenant}-once"}
            published = (await post("/v1/events", once)).json["id"]
            later = {"type": "a.b", "tenant": tenant, "deliver_at": "2999-01-01T00:00:00Z"}
            waits = (await post("/v1/events", later)).json["id"]
            job = await post("/v1/replays", {"endpoint": f"{tenant}-shop", "since": "1h"})
            first = next(s for s in sent if s.url.endswith(f"{tenant}-shop"))
            self.ids[tenant] = {
                "letter": letter["id"],
                "event": letter["event"],
                "published": published,
                "waits": waits,
                "job": job.json["id"],
                "delivery": first.delivery,
                "lane": first.lane,
            }

    async def theirs(self) -> str:
        return str(await fetchval(self.database, THEIRS))
