// Search for events.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { filters, follow, pages } from "../listing.js";
import { badge, button, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, time } from "../format.js";
import { publish, searchForm } from "../event_actions.js";

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

export function view(place, _, values) {
  const extent = h("p", { class: "hint" });
  const filtered = Object.keys(values).length > 0;
  const list = pages((after, signal) => get("/v1/events", { ...values, limit: 50, deliveries: true, after }, signal), (items, page) => {
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
    extent, list.place);
  return follow(place, list, { costly: filtered && !values.key });
}
