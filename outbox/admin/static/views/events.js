// Find an event.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { link, pulse } from "../main.js";
import { field, filters, pages, row, table } from "../parts.js";
import { ago, count, time } from "../say.js";

const HEADS = ["When", "Type", "Key", "Tenant", "Event"];

export function view(place, _, values) {
  const looked = h("p", { class: "hint" });
  const list = pages((after) => get("/v1/events", { ...values, limit: 50, after }), (items, page) => {
    if (page.items) {
      show(looked, page.looked_at === null || page.next === null ? null
        : `Looked at the newest ${count(page.looked_at)}, back to ${time(page.looked_back_to)}; “More” goes on.`);
    }
    return table(HEADS, items.map((each) => row([
      h("time", { datetime: each.published_at, title: time(each.published_at) }, ago(each.published_at, session.now())),
      each.type,
      each.key === null ? "–" : h("a", { href: link("events", [], { key: each.key }) }, each.key),
      each.tenant ?? "–",
      h("a", { href: link("trace", [each.id]) }, h("code", null, each.erased_at ? `${each.id} (erased)` : each.id)),
    ], HEADS)), "There is no event like this.");
  });
  const find = h("form", {
    class: "find", role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      const wanted = new FormData(event.target).get("wanted").trim();
      if (wanted) location.hash = link("trace", [wanted]);
    },
  }, field("What happened to", h("input", { name: "wanted", autocomplete: "off", spellcheck: "false", placeholder: "event id, X-Delivery, once key or key" })),
  h("button", { type: "submit", class: "main" }, "Trace it"));
  show(place, h("h1", null, "Events"), find,
    filters([["key", "Key"], ["type", "Type"], ["since", "Since"], ["until", "Until"], ...(session.tenant === null ? [["tenant", "Tenant"]] : [])],
      values, (next) => { location.hash = link("events", [], next); }),
    looked, list.place);
  list.load().then(() => pulse(null), (error) => { show(list.place, h("p", { class: "bad" }, error.message)); pulse(error.status ? null : error); });
}
