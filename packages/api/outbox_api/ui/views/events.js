// Search for events.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { follow, pages } from "../listing.js";
import { badge, button, heading, idLink, isOperator, oneLine, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, duration, plural, time } from "../format.js";
import { publish } from "../event_actions.js";
import { searchField } from "../search_field.js";

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

const emptyText = (values) => (Object.keys(values).length ? "No events match the filter."
  : ["No events yet.", isOperator() && [" Publish one in a transaction of your application, or here: ", h("code", null, "outbox publish order.paid --key order-7 --payload '{}'")]]);

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
      oneLine(each.type),
      each.key === null ? "–" : h("a", { href: link("events", [], { key: each.key }) }, oneLine(each.key)),
      deliveries(each.deliveries), count(each.deliveries?.attempts),
      payload(each),
      each.tenant ?? "–",
      [idLink(each.id, link("trace", [each.id])), each.erased_at && h("small", null, " erased")],
    ], HEADS, each.id)), emptyText(values));
  });
  // A word without a name leads to the trace of what it names.
  const search = searchField({
    names: ["key", "type", "tenant", "since", "until"], bare: "id",
    values, examples: ["type:order.*", "since:1h", "key:order-7"], placeholder: "an event id, X-Delivery, key, once key or outbox id; or type:order.*, since:2h …",
    onChange: ({ id, ...next }) => { location.hash = id ? link("trace", [id]) : link("events", [], next); } });
  show(place, heading("Events", button("Publish event", publish, { scope: "publish" })), search, held, extent, list.place);
  return follow(place, list, { costly: filtered && !values.key });
}
