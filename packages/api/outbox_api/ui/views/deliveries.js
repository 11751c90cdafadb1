// The delivery log: of an endpoint, or of a tenant, a key or an event.

import { get, name, session } from "../api.js";
import { attemptCount, badge, oneLine, row, table, when } from "../components.js";
import { openPanel } from "../delivery_panel.js";
import { h, show } from "../dom.js";
import { duration, plural, time } from "../format.js";
import { follow, pages } from "../listing.js";
import { link } from "../router.js";
import { searchField } from "../search_field.js";

const NAMES = ["endpoint", "tenant", "status", "outcome", "type", "key", "event", "since", "until"];
const FLAGS = ["failed"];
const EXAMPLES = ["failed", "status:5xx", "status:404", "outcome:pending", "outcome:dead", "outcome:exhausted", "since:1h", "type:order.*"];
const HEADS = ["When", "Endpoint", "Outcome", "Response", "#Duration", "#Attempts", "Type", "Key", "X-Delivery"];
// These scan deliveries that do not match.
const COSTLY = ["type", "status", "tenant"];

const isNarrow = (values) => session.tenant !== null || ["endpoint", "tenant", "key", "event"].some((each) => values[each]);

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

function draw(items, values, opened, open) {
  const heads = values.endpoint ? HEADS.filter((each) => each !== "Endpoint") : HEADS;
  return table(heads, items.map((each) => {
    const line = row([
      when(each.at),
      !values.endpoint && h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint),
      h("span", { class: "badges" }, badge(each.outcome), each.reason && h("small", null, each.reason)),
      each.status ?? each.failure?.replaceAll("_", " ") ?? "–",
      duration(each.elapsed_ms === null ? null : each.elapsed_ms / 1000),
      attemptCount(each),
      each.type ?? "–",
      each.key === null ? "–" : oneLine(each.key),
      each.delivery === null ? "–" : h("a", { class: "id", href: link("deliveries", [], { ...values, show: each.delivery }), title: each.delivery,
        onclick: (event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          open(each.delivery);
        } }, h("code", null, `${each.delivery.slice(0, 8)}…`)),
    ].filter((cell) => cell !== false), heads, `${each.lane}/${each.sequence}`);
    if (each.delivery !== null && each.delivery === opened) line.setAttribute("aria-current", "true");
    return line;
  }), Object.keys(values).length > (values.endpoint ? 1 : 0) ? "No deliveries match." : "No deliveries yet: publish an event of a type that the endpoint receives.");
}

// Arrow keys go from row to row.
function onArrow(event) {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const links = [...event.currentTarget.querySelectorAll("a.id")];
  const at = links.indexOf(document.activeElement);
  if (at < 0) return;
  event.preventDefault();
  links[at + (event.key === "ArrowDown" ? 1 : -1)]?.focus();
}

export function view(place, _, { show: shown, ...values }) {
  const change = (next) => { location.hash = link("deliveries", [], next); };
  const search = searchField(NAMES.filter((each) => each !== "tenant" || session.tenant === null), FLAGS, values, EXAMPLES, change);
  const title = h("h1", null, "Deliveries", values.endpoint && [" to ", h("a", { href: link("endpoint", [values.endpoint]) }, values.endpoint)]);
  if (!isNarrow(values)) {
    show(place, title, search, h("p", { class: "hint" }, "Name an endpoint, a tenant, a key or an event: ",
      h("code", null, "endpoint:shop"), ", ", h("code", null, "tenant:acme"), ", ", h("code", null, "key:order-7"), ". Then add what you look for: ",
      h("code", null, "failed"), ", ", h("code", null, "status:5xx"), "."),
    h("p", null, h("a", { href: link("endpoints") }, "Endpoints"), " lead to their deliveries, too."));
    return undefined;
  }
  const { endpoint, ...rest } = values;
  const path = endpoint ? `/v1/endpoints/${name(endpoint)}/deliveries` : "/v1/deliveries";
  const extent = h("p", { class: "hint" });
  const panel = h("aside", { class: "panel", "aria-label": "Delivery", tabindex: "-1", hidden: true });
  let opened = null;
  let stopPanel = null;
  let isLoaded = false;
  const list = pages((after, signal) => get(path, { ...rest, limit: 50, after }, signal), (items, page) => {
    isLoaded = true;
    show(extent, notes(page, items).join(" "));
    return draw(items, values, opened, open);
  });
  // The list stays as it is, so the URL changes without a new view.
  function open(delivery) {
    stopPanel?.();
    opened = delivery;
    panel.hidden = delivery === null;
    history.replaceState(null, "", link("deliveries", [], delivery === null ? values : { ...values, show: delivery }));
    stopPanel = delivery === null ? null : openPanel(panel, delivery, close);
    if (delivery !== null) panel.focus();
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
  list.place.onkeydown = onArrow;
  show(place, title, search, extent, h("div", { class: "beside" }, list.place, panel));
  const stop = follow(place, list, { costly: COSTLY.some((each) => values[each]) });
  if (shown) open(shown);
  return () => {
    ended.abort();
    stopPanel?.();
    stop();
  };
}
