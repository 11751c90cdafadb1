// List of endpoints, ordered by severity.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { pages } from "../listing.js";
import { live } from "../live.js";
import { condition, row, table } from "../components.js";
import { link } from "../router.js";
import { count } from "../format.js";

const HEADS = ["Endpoint", "State", "#Pending", "#Dead letters", "#Lanes", "Types", "Tenant", "URL"];
const SEVERITY = ["blocked", "failing", "rejecting", "disabling", "disabled", "removing", "paused", "recovering", "degraded"];
// The API orders by name; one large page lets the browser sort nearly all installations completely.
const PAGE = 500;
// Counting the dead letters of a large page is slow.
const EVERY_MS = 10000;

function rank(each) {
  const place = SEVERITY.indexOf(each.condition);
  return place < 0 ? SEVERITY.length : place;
}

const bySeverity = (a, b) => rank(a) - rank(b) || b.pending - a.pending || (a.name < b.name ? -1 : 1);

export function view(place) {
  const list = pages((after) => get("/v1/endpoints", { limit: PAGE, after }), (items) => table(HEADS, [...items].sort(bySeverity).map((each) => row([
    h("a", { href: link("endpoint", [each.name]) }, each.name),
    condition(each, each.lanes, each.state_comment),
    count(each.pending),
    each.dead_letters ? h("a", { href: link("dead-letters", [], { endpoint: each.name }) }, count(each.dead_letters)) : "0",
    count(each.lanes),
    each.types.join(", "),
    each.all_tenants ? "all" : each.tenant ?? "–",
    h("span", { class: "url" }, each.url),
  ], HEADS, each.name)), "No endpoints yet."));
  show(place, h("h1", null, "Endpoints"),
    h("div", { class: "actions" }, session.may("operate") && h("a", { class: "button main", href: link("new-endpoint") }, "New endpoint")), list.place);
  return live(place, () => list.load(), { every: EVERY_MS });
}
