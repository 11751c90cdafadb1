// Search for events.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { filters, follow, pages } from "../listing.js";
import { badge, button, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, duration, plural, time } from "../format.js";
import { publish, searchForm } from "../event_actions.js";

const HELD_MAX = 10000;
const HEADS = ["When", "Type", "Key", "Deliveries", "#Attempts", "Payload", "Tenant", "Event"];
// States of deliveries, most severe first.
const STATES = ["dead", "pending", "delivered", "replayed", "discarded"];

// Counts of an event's deliveries as badges.
function deliveries(counts) {
  if (!counts) return h("span", { class: "hint", title: "Not sequenced yet, or to very many endpoints: see its trace" }, "–");
  const found = STATES.filter((state) => counts[state]);
  return found.length ? h("span", { class: "badges" }, found.map((state) => badge(state, null, counts[state] > 1 ? ` ${count(counts[state])}` : "")))
    : h("span", { class: "hint", title: "No endpoint receives it" }, "none");
}

const payload = (each) => (each.erased_at ? "erased" : each.preview === null ? "–" : h("code", { class: "cut", title: each.preview }, each.preview));

const emptyText = (values) => (Object.keys(values).length ? "No events match the filter." : "No events yet.");

// What is accepted and not published yet, because it exceeds the shares of tenants.
function describeHeld({ events, deliveries, oldest_at: oldest, now }) {
  if (!events) return null;
  const number = events > HELD_MAX ? `More than ${count(HELD_MAX)} events` : plural(events, "event");
  return `${number} with ${plural(deliveries, "delivery", "deliveries")} held for the share of ${session.tenant ?? "their tenant"}, the oldest for ${duration((Date.parse(now) - Date.parse(oldest)) / 1000)}: published in order, and traced by id until then.`;
}

export function view(place, _, values) {
  const extent = h("p", { class: "hint" });
  const held = h("p", { class: "hint" });
  const filtered = Object.keys(values).length > 0;
  const list = pages(async (after, signal) => {
    const [page, future] = await Promise.all([get("/v1/events", { ...values, limit: 50, deliveries: true, after }, signal),
      get("/v1/future-events", { held: true, limit: 1, tenant: values.tenant }, signal)]);
    show(held, describeHeld(future.held));
    return page;
  }, (items, page) => {
    show(extent, filtered && page.scanned && page.next
      ? `Searched the newest ${count(page.scanned)} events, back to ${time(page.scanned_back_to)}. “Load more” continues the search.` : null);
    return table(HEADS, items.map((each) => row([
      when(each.published_at),
      each.type,
      each.key === null ? "–" : h("a", { href: link("events", [], { key: each.key }) }, each.key),
      deliveries(each.deliveries), count(each.deliveries?.attempts),
      payload(each),
      each.tenant ?? "–",
      h("a", { class: "id", href: link("trace", [each.id]) }, h("code", null, each.erased_at ? `${each.id} (erased)` : each.id)),
    ], HEADS, each.id)), emptyText(values));
  });
  show(place, h("h1", null, "Events"), h("div", { class: "actions" }, button("Publish event", publish, { scope: "publish" })), searchForm(),
    filters([["key", "Key"], ["type", "Type"], ["since", "Since"], ["until", "Until"], ...(session.tenant === null ? [["tenant", "Tenant"]] : [])],
      values, (next) => { location.hash = link("events", [], next); }),
    held, extent, list.place);
  return follow(place, list, { costly: filtered && !values.key });
}
