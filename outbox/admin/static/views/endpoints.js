// All endpoints.

import { get } from "../api.js";
import { h, show } from "../dom.js";
import { link, pulse } from "../main.js";
import { badge, pages, row, stateOf, table } from "../parts.js";
import { count } from "../say.js";

const HEADS = ["Endpoint", "State", "#Owed", "#Dead letters", "#Lanes", "Types", "Tenant", "URL"];

export function view(place) {
  const list = pages((after) => get("/v1/endpoints", { limit: 50, after }), (items) => table(HEADS, items.map((each) => row([
    h("a", { href: link("endpoint", [each.name]) }, each.name),
    badge(stateOf(each), each.state_why),
    count(each.owed),
    each.dead_letters ? h("a", { href: link("dead", [], { endpoint: each.name }) }, count(each.dead_letters)) : "0",
    count(each.lanes),
    each.types.join(", "),
    each.all_tenants ? "all" : each.tenant ?? "–",
    h("span", { class: "url" }, each.url),
  ], HEADS)), "There is no endpoint yet: outbox endpoint add NAME URL."));
  show(place, h("h1", null, "Endpoints"), list.place);
  list.load().then(() => pulse(null), pulse);
}
