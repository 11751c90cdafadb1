// All endpoints, those in trouble first.

import { get } from "../api.js";
import { h, show } from "../dom.js";
import { pages } from "../listing.js";
import { live } from "../live.js";
import { badge, operator, row, table } from "../parts.js";
import { link } from "../places.js";
import { count } from "../say.js";

const HEADS = ["Endpoint", "State", "#Owed", "#Dead letters", "#Lanes", "Types", "Tenant", "URL"];
const TROUBLE = ["blocked", "failing", "refusing", "disabling", "disabled", "removing", "paused", "recovering"];
// By name they come; so many are read at once, so that nearly always all of them are sorted.
const PAGE = 500;
// Counting dead letters of so many takes a moment.
const EVERY_MS = 10000;

function rank(each) {
  const place = TROUBLE.indexOf(each.condition);
  return place < 0 ? TROUBLE.length : place;
}

const byTrouble = (a, b) => rank(a) - rank(b) || b.owed - a.owed || (a.name < b.name ? -1 : 1);

export function view(place) {
  const list = pages((after) => get("/v1/endpoints", { limit: PAGE, after }), (items) => table(HEADS, [...items].sort(byTrouble).map((each) => row([
    h("a", { href: link("endpoint", [each.name]) }, each.name),
    badge(each.condition, each.state_why),
    count(each.owed),
    each.dead_letters ? h("a", { href: link("dead", [], { endpoint: each.name }) }, count(each.dead_letters)) : "0",
    count(each.lanes),
    each.types.join(", "),
    each.all_tenants ? "all" : each.tenant ?? "–",
    h("span", { class: "url" }, each.url),
  ], HEADS, each.name)), ["There is no endpoint yet", operator() ? [": ", h("code", null, "outbox endpoint add NAME URL")] : null, "."]));
  show(place, h("h1", null, "Endpoints"), list.place);
  return live(place, () => list.load(), { every: EVERY_MS });
}
