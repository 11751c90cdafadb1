// List of endpoints, ordered by severity.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { EVERY_MS as HISTORY_EVERY_MS, latencySparkline, milliseconds, percent, sparkline } from "../history.js";
import { pages } from "../listing.js";
import { live } from "../live.js";
import { condition, row, table } from "../components.js";
import { link } from "../router.js";
import { count } from "../format.js";

const HEADS = ["Endpoint", "State", "Last 24 hours", "#Median, p99", "#Pending", "#Dead letters", "#Lanes", "Types", "Tenant", "URL"];
const SEVERITY = ["blocked", "failing", "rejecting", "disabling", "disabled", "removing", "paused", "recovering", "degraded"];
// The API orders by name; one large page lets the browser sort nearly all installations completely.
const PAGE = 500;
const HISTORY_PAGE = 100;
// Counting the dead letters of a large page is slow.
const EVERY_MS = 10000;

function rank(each) {
  const place = SEVERITY.indexOf(each.condition);
  return place < 0 ? SEVERITY.length : place;
}

const bySeverity = (a, b) => rank(a) - rank(b) || b.pending - a.pending || (a.name < b.name ? -1 : 1);

// The histories of all endpoints up to a name.
async function readHistories(last, signal) {
  const found = new Map();
  let after = null;
  do {
    const page = await get("/v1/endpoint-histories", { limit: HISTORY_PAGE, after }, signal);
    for (const each of page.items) found.set(each.name, each);
    after = page.next;
  } while (after !== null && after < last);
  return found;
}

function pastDay(history) {
  if (!history) return ["", ""];
  if (!history.items.length) return ["–", "–"];
  return [
    h("span", { class: "past" }, sparkline(history.items, session.now()), percent(history.successes, history.failures)),
    history.p50_ms === null ? "–" : h("span", { class: "past" }, latencySparkline(history.items, session.now()),
      `${milliseconds(history.p50_ms)}, ${milliseconds(history.p99_ms)}`),
  ];
}

export function view(place) {
  let histories = new Map();
  let historiesAt = 0;
  let last = "";
  const list = pages((after) => get("/v1/endpoints", { limit: PAGE, after }), (items) => {
    last = items.at(-1)?.name ?? "";
    return table(HEADS, [...items].sort(bySeverity).map((each) => row([
      h("a", { href: link("endpoint", [each.name]) }, each.name),
      condition(each, each.lanes, each.state_comment),
      ...pastDay(histories.get(each.name)),
      count(each.pending),
      each.dead_letters ? h("a", { href: link("dead-letters", [], { endpoint: each.name }) }, count(each.dead_letters)) : "0",
      count(each.lanes),
      each.types.join(", "),
      each.all_tenants ? "all" : each.tenant ?? "–",
      h("span", { class: "url" }, each.url),
    ], HEADS, each.name)), "No endpoints yet.");
  });
  show(place, h("h1", null, "Endpoints"),
    h("div", { class: "actions" }, session.may("operate") && h("a", { class: "button main", href: link("new-endpoint") }, "New endpoint")), list.place);
  return live(place, async (signal) => {
    await list.load();
    if (last && session.now() - historiesAt >= HISTORY_EVERY_MS) {
      // After the list, because they take longer.
      [histories, historiesAt] = [await readHistories(last, signal), session.now()];
      list.repaint();
    }
  }, { every: EVERY_MS });
}
