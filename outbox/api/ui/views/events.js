// Find an event.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { filters, pages } from "../listing.js";
import { once, permanent } from "../live.js";
import { operator, row, table, when } from "../parts.js";
import { link } from "../places.js";
import { count, sentence, time } from "../say.js";
import { field } from "../talk.js";

const HEADS = ["When", "Type", "Key", "Tenant", "Event"];

// Nothing there at all is not a search without a find.
function none(values) {
  if (Object.keys(values).length) return "There is no event like this.";
  return ["No event was published yet.", session.may("publish")
    ? [" Publish one: ", h("code", null, operator() ? "outbox publish order.paid '{\"order\": 7}'" : "POST /v1/events"), "."] : null];
}

function finding() {
  return h("form", {
    class: "find", role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      const wanted = new FormData(event.target).get("wanted").trim();
      if (wanted) location.hash = link("trace", [wanted]);
    },
  }, field("What happened to", h("input", { name: "wanted", autocomplete: "off", spellcheck: "false",
    placeholder: "an event id or a key", title: "An event id, an X-Delivery, a once key, or a key" })),
  h("button", { type: "submit", class: "main" }, "Trace it"));
}

export function view(place, _, values) {
  const looked = h("p", { class: "hint" });
  const filtered = Object.keys(values).length > 0;
  const list = pages((after) => get("/v1/events", { ...values, limit: 50, after }), (items, page) => {
    show(looked, filtered && page.looked_at && page.next
      ? `Looked at the newest ${count(page.looked_at)}, back to ${time(page.looked_back_to)}; “More” goes on.` : null);
    return table(HEADS, items.map((each) => row([
      when(each.published_at),
      each.type,
      each.key === null ? "–" : h("a", { href: link("events", [], { key: each.key }) }, each.key),
      each.tenant ?? "–",
      h("a", { href: link("trace", [each.id]) }, h("code", null, each.erased_at ? `${each.id} (erased)` : each.id)),
    ], HEADS, each.id)), none(values));
  });
  show(place, h("h1", null, "Events"), finding(),
    filters([["key", "Key"], ["type", "Type"], ["since", "Since"], ["until", "Until"], ...(session.tenant === null ? [["tenant", "Tenant"]] : [])],
      values, (next) => { location.hash = link("events", [], next); }),
    looked, list.place);
  return once(place, () => list.load().catch((error) => {
    if (!permanent(error)) throw error;
    show(list.place, h("p", { class: "bad" }, sentence(error.message)));
  }));
}
