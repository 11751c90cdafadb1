// What needs a person, most urgent first: one sentence, a link and the button that resolves it.

import { button } from "./components.js";
import { h } from "./dom.js";
import * as endpointActions from "./endpoint_actions.js";
import { count, duration, plural } from "./format.js";
import { link } from "./router.js";

const SHOWN = 8;

const open = (endpoint, text) => h("a", { class: "button", href: link("endpoint", [endpoint]) }, text);
const retryNow = (endpoint) => button("Retry now", () => endpointActions.runVerb(endpoint, "resume", "Retrying now, one request at a time at first."));
const waits = (each) => (each.pending ? ` ${count(each.pending)} ${each.pending === 1 ? "delivery waits" : "deliveries wait"}${each.oldest_s === null ? "" : `, the oldest for ${duration(each.oldest_s)}`}.` : "");
const blockedLanes = (each) => plural(each.lanes.filter((lane) => lane.blocked).length || 1, "lane");

// By the condition of an endpoint: the sentence, and the action.
const CONDITIONS = {
  blocked: (each) => [`${blockedLanes(each)} blocked by a dead letter, until you replay or discard it.`,
    h("a", { class: "button", href: link("dead-letters", [], { endpoint: each.name }) }, "Decide")],
  failing: (each) => ["All requests fail. Its lanes are probed until one succeeds.", [open(each.name, "Find out why"), retryNow(each.name)]],
  rejecting: (each) => ["It rejects everything it gets: a wrong URL, secret or credential?", [open(each.name, "Find out why"), retryNow(each.name)]],
  degraded: (each) => [`${plural(each.failing_lanes, "lane")} of ${each.lanes_total} stuck, each on one delivery. The others go on.`, open(each.name, "Show the stuck lanes")],
  disabled: (each) => ["It is disabled and gets no events.", [open(each.name, "Find out why"), button("Enable", () => endpointActions.runVerb(each.name, "enable", `${each.name} is enabled. It receives new events.`))]],
  paused: (each) => ["It is paused.", button("Resume", () => endpointActions.resume(each.name, []))],
};
const ORDER = Object.keys(CONDITIONS);

const item = (key, tone, name, sentence, action) => h("li", { "data-key": key, class: `is-${tone}` },
  name, h("span", { class: "what" }, sentence), h("span", { class: "actions" }, action));

function endpointItem(each) {
  const [sentence, action] = CONDITIONS[each.condition](each);
  return item(each.name, each.condition === "paused" || each.condition === "disabled" ? "off" : each.condition === "degraded" ? "fair" : "bad",
    h("a", { class: "name", href: link("endpoint", [each.name]) }, each.name), sentence + waits(each), action);
}

// `status` is that of /v1/live; `dead` is the number of dead letters as text.
export function attention(status, dead) {
  const { totals } = status;
  const endpoints = status.endpoints.filter((each) => each.condition in CONDITIONS && (each.condition !== "paused" || each.pending))
    .sort((a, b) => ORDER.indexOf(a.condition) - ORDER.indexOf(b.condition) || b.pending - a.pending);
  const items = endpoints.slice(0, SHOWN).map(endpointItem);
  const others = endpoints.length - SHOWN;
  if (others > 0) items.push(item("-more", "fair", h("a", { class: "name", href: link("endpoints") }, `and ${count(others)} more`), "Endpoints with the same needs.", null));
  if (totals.dead_letters) {
    items.push(item("-dead", "bad", h("a", { class: "name", href: link("dead-letters") }, "Dead letters"),
      `${dead} ${totals.dead_letters === 1 ? "delivery was" : "deliveries were"} given no further attempt. Replay them when the cause is repaired, or discard them.`,
      h("a", { class: "button", href: link("dead-letters") }, "Review")));
  }
  return h("section", { "aria-label": "Needs attention" }, h("h2", null, items.length ? "Needs attention" : "Nothing needs attention"),
    items.length ? h("ul", { class: "attention" }, items) : null);
}
