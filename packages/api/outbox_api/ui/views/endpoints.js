// List of endpoints, ordered by severity.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { changeEndpoints } from "../endpoint_bulk.js";
import { milliseconds, percent, readHistory, sparkline } from "../history.js";
import { pages } from "../listing.js";
import { live } from "../live.js";
import { rowBox, selection, selectionBar } from "../selection.js";
import { button, condition, heading, isOperator, oneLine } from "../components.js";
import { searchField } from "../search_field.js";
import { tallTable } from "../tall_table.js";
import { link } from "../router.js";
import { count, duration } from "../format.js";

const COLUMNS = [["Endpoint"], ["State", 200], ["Last 24 hours", 185], ["#Median, p99", 125], ["#Pending, oldest", 130], ["#Dead", 60], ["#Lanes", 62],
  ["Types", "6%"], ["Tenant", "6%"], ["URL", "8%"]];
const SEVERITY = ["blocked", "failing", "rejecting", "disabling", "disabled", "removing", "paused", "recovering", "degraded"];
const CONDITIONS = [...SEVERITY, "draining", "healthy"];
// The API orders by name; the browser sorts what it has read.
const PAGE = 1000;
const READ_MAX = 10_000;
const HISTORY_PAGE = 100;
const HISTORIES_MS = 5000;
// Counting the dead letters of a large page is slow, and thousands of endpoints are a megabyte.
const EVERY_MS = 10_000;
const EVERY_OF_MANY_MS = 60_000;

function rank(each) {
  const place = SEVERITY.indexOf(each.condition);
  return place < 0 ? SEVERITY.length : place;
}

// shop-9 comes before shop-10.
const { compare } = new Intl.Collator("en", { numeric: true });

const bySeverity = (a, b) => rank(a) - rank(b) || b.pending - a.pending || compare(a.name, b.name);

function pastDay(history) {
  if (!history) return ["", ""];
  if (!history.items.length) return ["–", "–"];
  return [
    h("span", { class: "past" }, sparkline(history.items, session.now()), percent(history.successes, history.failures)),
    history.p50_ms === null ? "–" : `${milliseconds(history.p50_ms)}, ${milliseconds(history.p99_ms)}`,
  ];
}

async function readPages(filter, after, signal) {
  const items = [];
  let page;
  do {
    page = await get("/v1/endpoints", { ...filter, limit: PAGE, after }, signal);
    items.push(...page.items);
    after = page.next;
  } while (after !== null && items.length < READ_MAX);
  return { ...page, items };
}

export function view(place, _, values) {
  const filtered = Object.keys(values).length > 0;
  const selected = selection("endpoints", values);
  const histories = new Map();
  let historiesAfter = null;
  let shown = [];
  let sorted = [];
  let sortedOf = null;
  let total = 0;
  const bar = h("div", { class: "selection", role: "group", "aria-label": "Selection" });
  const mayOperate = session.may("operate");
  const rows = tallTable(mayOperate ? [["", 40], ...COLUMNS] : COLUMNS, { keyOf: (each) => each.name, cells, repaint: () => list.repaint() });
  const empty = filtered ? "No endpoints match the filter." : ["No endpoints yet.", isOperator() && [" Create one here, or with ", h("code", null, "outbox endpoint add shop https://… --type 'order.*'"), "."]];
  const list = pages((after, signal) => readPages(values, after, signal), (items, page) => {
    if (items !== sortedOf) {
      sorted = [...items].sort(bySeverity);
      sortedOf = items;
      shown = items.map((each) => each.name);
      total = page.total;
      // All are shown, so those that are not have been removed.
      const names = new Set(shown);
      if (page.next === null) selected.remove([...selected.single].filter((each) => !names.has(each)));
    }
    drawActions();
    if (!items.length) return h("p", { class: "empty" }, empty);
    show(rows.place, rows.draw(sorted));
    return rows.place;
  });

  function cells(each) {
    return [
      ...(mayOperate ? [rowBox(selected, each.name, `Select ${each.name}`, shown, list.repaint)] : []),
      h("a", { href: link("endpoint", [each.name]) }, oneLine(each.name)),
      condition(each, each.lanes, each.state_comment),
      ...pastDay(histories.get(each.name)),
      each.pending ? `${count(each.pending)}, ${duration(each.oldest_s)}` : "0",
      each.dead_letters ? h("a", { href: link("dead-letters", [], { endpoint: each.name }) }, count(each.dead_letters)) : "0",
      count(each.lanes),
      oneLine(each.types.join(", ")),
      each.all_tenants ? "all" : each.tenant === null ? "–" : oneLine(each.tenant),
      oneLine(each.url, "url"),
    ];
  }

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

  // Reads for some seconds, and goes on from there the next time.
  const details = readHistory(async (signal) => {
    const until = performance.now() + HISTORIES_MS;
    const last = shown.at(-1) ?? "";
    do {
      const page = await get("/v1/endpoint-histories", { ...values, limit: HISTORY_PAGE, after: historiesAfter }, signal);
      for (const each of page.items) histories.set(each.name, each);
      historiesAfter = page.next !== null && page.next < last ? page.next : null;
    } while (historiesAfter !== null && performance.now() < until);
    list.repaint();
  });
  show(place, heading("Endpoints", mayOperate && h("a", { class: "button main", href: link("new-endpoint") }, "New endpoint")),
    searchField({ names: ["search", "condition", "type", "tenant"], bare: "search", values, examples: CONDITIONS.map((each) => `condition:${each}`),
      placeholder: "a name or URL; or condition:failing, type:order.paid …", onChange: (next) => { location.hash = link("endpoints", [], next); } }),
    bar, list.place);
  const ended = new AbortController();
  for (const kind of ["scroll", "resize"]) addEventListener(kind, rows.onScroll, { passive: true, signal: ended.signal });
  const stop = live(place, list.load, { every: () => (shown.length > PAGE ? EVERY_OF_MANY_MS : EVERY_MS), details });
  return () => {
    ended.abort();
    stop();
  };
}
