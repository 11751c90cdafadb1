// Uses types that openapi-typescript generated: node use.js URL TOKEN.
import createClient from "openapi-fetch";
import type { paths } from "./outbox.js";

declare const process: { argv: string[] };

function check(holds: boolean, what: unknown): asserts holds {
  if (!holds) throw new Error(JSON.stringify(what));
}

const [url, token] = process.argv.slice(2);
const client = createClient<paths>({
  baseUrl: url,
  headers: { Authorization: `Bearer ${token}` },
});

const body = { name: "crm-ts", url: "https://crm.example/hooks", types: ["client.*"] };
const made = await client.POST("/v1/endpoints", { body });
check(made.data?.secret.startsWith("whsec_") === true, made.error);
const refused = await client.POST("/v1/endpoints", { body });
check(refused.error?.type === "urn:outbox:problem:conflict", refused);
const changed = await client.PATCH("/v1/endpoints/{name}", {
  params: { path: { name: "crm-ts" } },
  body: { lanes: 2, rate: null },
});
check(changed.data !== undefined, changed.error);
const endpoints = await client.GET("/v1/endpoints", { params: { query: { search: "crm-ts" } } });
check(endpoints.data?.items[0]?.name === "crm-ts", endpoints);

const one = await client.POST("/v1/events", {
  body: { type: "client.added", key: "client-7", payload: { client: 7 } },
  params: { header: { "Idempotency-Key": "client-7" } },
});
check(one.data !== undefined && "id" in one.data && one.data.id !== null, one);
const several = await client.POST("/v1/events", {
  body: { events: [{ type: "client.changed", key: "client-7" }, { type: "client.left" }] },
});
check(several.data !== undefined && "events" in several.data, several);
check(several.data.events.every((each) => !each.already), several);
// @ts-expect-error: an event without its type is refused by the compiler, and by the server.
const wrong = await client.POST("/v1/events", { body: { key: "client-7" } });
check(wrong.response.status === 422, wrong);

const events = await client.GET("/v1/events", { params: { query: { key: "client-7" } } });
check(events.data?.items.length === 2, events);
const traced = await client.GET("/v1/trace/{id}", { params: { path: { id: one.data.id } } });
check(traced.data?.events[0]?.event.event_id === one.data.id, traced);

const dead = await client.GET("/v1/dead-letters", { params: { query: { endpoint: "shop" } } });
const ids = dead.data?.items.map((each) => each.id);
check(ids !== undefined && ids.length > 0, dead);
const replayed = await client.POST("/v1/dead-letters/replay", { body: { ids } });
check(replayed.data !== undefined, replayed.error);
console.log("used");
