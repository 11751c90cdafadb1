// List of endpoints, ordered by severity.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { changeEndpoints } from "../endpoint_bulk.js";
import { latencySparkline, milliseconds, percent, readHistory, sparkline } from "../history.js";
import { filters, pages } from "../listing.js";
import { live } from "../live.js";
import { rowBox, selection, selectionBar } from "../selection.js";
import { button, condition, oneLine, row, table } from "../components.js";
import { link } from "../router.js";
import { count } from "../format.js";

const HEADS = ["Endpoint", "State", "Last 24 hours", "#Median, p99", "#Pending", "#Dead letters", "#Lanes", "Types", "Tenant", "URL"];
const SEVERITY = ["blocked", "failing", "rejecting", "disabling", "disabled", "removing", "paused", "recovering", "degraded"];
const CONDITIONS = ["", "healthy", ...[...SEVERITY].reverse(), "draining"].map((each) => [each, each || "any"]);
// The API orders by name; one large page lets the browser sort nearly all installations completely.
const PAGE = 500;
const HISTORY_PAGE = 100;
// Counting the dead letters of a large page is slow.
const EVERY_MS = 10000;

function rank(each) {
  const place = SEVERITY.indexOf(each.condition);
  return place < 0 ? SEVERITY.length : place;
}

// shop-9 comes before shop-10.
const { compare } = new Intl.Collator("en", { numeric: true });

const bySeverity = (a, b) => rank(a) - rank(b) || b.pending - a.pending || compare(a.name, b.name);

// The histories of the endpoints that match a filter, up to a name.
async function readHistories(filter, last, signal) {
  const found = new Map();
  let after = null;
  do {
    const page = await get("/v1/endpoint-histories", { ...filter, limit: HISTORY_PAGE, after }, signal);
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

export function view(place, _, values) {
  const filtered = Object.keys(values).length > 0;
  const selected = selection("endpoints", values);
  let histories = new Map();
  let shown = [];
  let total = 0;
  const bar = h("div", { class: "selection", role: "group", "aria-label": "Selection" });
  const mayOperate = session.may("operate");
  const heads = mayOperate ? ["", ...HEADS] : HEADS;
  const list = pages((after, signal) => get("/v1/endpoints", { ...values, limit: PAGE, after }, signal), (items, page) => {
    shown = items.map((each) => each.name);
    total = page.total;
    // All are shown, so those that are not have been removed.
    if (page.next === null) selected.remove([...selected.single].filter((each) => !shown.includes(each)));
    drawActions();
    return table(heads, [...items].sort(bySeverity).map((each) => row([
      ...(mayOperate ? [rowBox(selected, each.name, `Select ${each.name}`, shown, list.repaint)] : []),
      h("a", { href: link("endpoint", [each.name]) }, oneLine(each.name)),
      condition(each, each.lanes, each.state_comment),
      ...pastDay(histories.get(each.name)),
      count(each.pending),
      each.dead_letters ? h("a", { href: link("dead-letters", [], { endpoint: each.name }) }, count(each.dead_letters)) : "0",
      count(each.lanes),
      oneLine(each.types.join(", ")),
      each.all_tenants ? "all" : each.tenant ?? "–",
      oneLine(each.url, "url"),
    ], heads, each.name)), filtered ? "No endpoints match the filter." : "No endpoints yet.");
  });

  function drawActions() {
    if (!mayOperate) return;
    async function act(verb) {
      if (!await changeEndpoints(verb, [...selected.single], selected.matching ? values : null)) return;
      selected.clear();
      list.repaint();
    }
    show(bar, selectionBar(selected, { shown, total, subject: ["endpoint", "endpoints"], filtered, repaint: list.repaint,
      buttons: () => [button("Pause…", () => act("pause")), button("Resume…", () => act("resume")), button("Enable…", () => act("enable"))] }));
  }

  const details = readHistory(async (signal) => {
    if (!shown.length) return;
    histories = await readHistories(values, shown.at(-1), signal);
    list.repaint();
  });
  show(place, h("h1", null, "Endpoints"),
    h("div", { class: "actions" }, mayOperate && h("a", { class: "button main", href: link("new-endpoint") }, "New endpoint")),
    filters([["search", "Name or URL"], ["condition", "State", CONDITIONS], ["type", "Receives type"], ...(session.tenant === null ? [["tenant", "Tenant"]] : [])],
      values, (next) => { location.hash = link("endpoints", [], next); }),
    bar, list.place);
  return live(place, list.load, { every: EVERY_MS, details });
}
