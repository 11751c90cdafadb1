// The delivery log: its filters, its list, and a delivery beside it.

import { get, name } from "./api.js";
import { attemptCount, badge, idLink, isOperator, oneLine, row, table, when } from "./components.js";
import { openPanel } from "./delivery_panel.js";
import { h, show } from "./dom.js";
import { duration, plural, time } from "./format.js";
import { follow, pages } from "./listing.js";
import { link } from "./router.js";
import { searchField } from "./search_field.js";

const NAMES = ["endpoint", "tenant", "status", "outcome", "type", "key", "event", "since", "until"];
const FLAGS = ["failed"];
// Words that mean a filter.
const WORDS = Object.fromEntries(["pending", "delivered", "dead"].map((each) => [each, { outcome: each }]));
const EXAMPLES = ["failed", "status:5xx", "status:404", "outcome:pending", "outcome:dead", "outcome:exhausted", "since:1h", "type:order.*"];
const HEADS = ["When", "Endpoint", "Outcome", "Response", "#Duration", "#Attempts", "Type", "Key", "X-Delivery"];
// These scan deliveries that do not match.
const COSTLY = ["type", "status", "tenant"];

// The field for filters, without those of `fixed`.  `onChange` gets the filters that are set.
export function logFilters(values, fixed, onChange) {
  return searchField({
    names: NAMES.filter((each) => !(each in fixed)), flags: FLAGS, words: WORDS, bare: "key",
    values, examples: EXAMPLES, placeholder: "status:5xx, failed, order-7, since:2h …", onChange });
}

// What a page leaves out.
function notes(page, items) {
  if (!page.scanned_back_to && !page.removed) return [];
  const removed = (what, part) => part && `${what} sequenced before ${time(part.before)} were removed by retention.`;
  return [
    page.ranges > 0 && `${plural(page.ranges, "range")} of deliveries that were dead-lettered together are not listed.`,
    page.next && page.scanned > items.length && `Searched back to ${time(page.scanned_back_to)}; “Load more” continues.`,
    !page.next && removed("Deliveries", page.removed),
    !page.next && removed("Events", page.events_removed),
  ].filter(Boolean);
}

function draw(items, endpoint, empty, opened, { href, open }) {
  const heads = endpoint ? HEADS.filter((each) => each !== "Endpoint") : HEADS;
  return table(heads, items.map((each) => {
    const line = row([
      when(each.at),
      !endpoint && h("a", { href: link("endpoint", [each.endpoint]) }, oneLine(each.endpoint)),
      h("span", { class: "badges" }, badge(each.outcome === "pending" && each.attempts ? "retrying" : each.outcome), each.reason && h("small", null, each.reason)),
      each.status ?? each.failure?.replaceAll("_", " ") ?? "–",
      duration(each.elapsed_ms === null ? null : each.elapsed_ms / 1000),
      attemptCount(each),
      each.type === null ? "–" : oneLine(each.type),
      each.key === null ? "–" : oneLine(each.key),
      each.delivery === null ? "–" : idLink(each.delivery, href(each.delivery), (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        open(each.delivery);
      }),
    ].filter((cell) => cell !== false), heads, `${each.lane}/${each.sequence}`);
    if (each.delivery !== null && each.delivery === opened) line.setAttribute("aria-current", "true");
    return line;
  }), empty);
}

// Show the log of an endpoint, or of all that a filter selects, in `place`.  `href` is the link to a delivery, or without one to the list; `shown` is the
// delivery that is open.  Returns a function that stops it.
export function deliveryLog(place, { endpoint, ...values }, { href, shown }) {
  const path = endpoint ? `/v1/endpoints/${name(endpoint)}/deliveries` : "/v1/deliveries";
  const empty = Object.keys(values).length ? "No deliveries match." : ["No deliveries yet.",
    isOperator() && [" Publish an event of a type that it receives: ", h("code", null, "outbox publish TYPE --payload '{}'")]];
  const extent = h("p", { class: "hint" });
  const panel = h("aside", { class: "panel", "aria-label": "Delivery", tabindex: "-1", hidden: true });
  let opened = null;
  let stopPanel = null;
  let isLoaded = false;
  const list = pages((after, signal) => get(path, { ...values, limit: 50, after }, signal), (items, page) => {
    isLoaded = true;
    show(extent, notes(page, items).join(" "));
    return draw(items, endpoint, empty, opened, { href, open });
  });
  // The list stays as it is, so the URL changes without a new view.
  function open(delivery) {
    stopPanel?.();
    opened = delivery;
    panel.hidden = delivery === null;
    history.replaceState(null, "", href(delivery));
    stopPanel = delivery === null ? null : openPanel(panel, delivery, close);
    if (delivery !== null) {
      panel.focus({ preventScroll: true });
      // Of a list that begins at the bottom of the window, the panel would be cut off.
      if (panel.getBoundingClientRect().top > innerHeight / 2) panel.parentElement.scrollIntoView();
    }
    if (isLoaded) list.repaint();
  }
  function close() {
    const was = opened;
    open(null);
    list.place.querySelector(`a.id[title="${CSS.escape(was)}"]`)?.focus();
  }
  const ended = new AbortController();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && opened !== null && !document.querySelector("dialog[open]")) close();
  }, { signal: ended.signal });
  show(place, extent, h("div", { class: "beside" }, list.place, panel));
  const stop = follow(place, list, { costly: COSTLY.some((each) => values[each]) });
  if (shown) open(shown);
  return () => {
    ended.abort();
    stopPanel?.();
    stop();
  };
}
