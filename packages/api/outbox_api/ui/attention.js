// What needs a person, most urgent first: the status of relays and endpoints, and findings of the doctor.

import { button, isOperator, responseLine } from "./components.js";
import { h } from "./dom.js";
import { capital, count, duration, plural } from "./format.js";
import { readAndResume } from "./endpoint_actions.js";
import { link } from "./router.js";
import { pauseAction, retryAction, stuckAction } from "./stuck_lane.js";

const SHOWN_MAX = 8;
// Checks of the doctor whose findings the status has, with the actions on them.
const IN_STATUS = ["relays", "sequencing", "endpoints", "health", "blocked lanes", "failing lanes", "dead letters"];
// A running relay sequences an event within milliseconds.
const WAITING_S_MAX = 10;

const endpointLink = (each) => h("a", { href: link("endpoint", [each.name]) }, each.name);

const deadLetters = (values, text) => h("a", { class: "button", href: link("dead-letters", [], values) }, text);

// A new element for each item.
const runChecks = () => h("a", { class: "button", href: link("replicas", [], { checks: "run" }) }, "Run checks");

function relayItems({ replicas, cursor, blocker, stopped }) {
  const alive = replicas.filter((each) => each.alive);
  const lapsed = replicas.length - alive.length;
  return [
    !alive.length && { rank: 0, key: "relays", text: ["No relay is running: nothing is delivered.", isOperator() && [" Start one: ", h("code", null, "outbox relay")]], action: runChecks() },
    alive.length && cursor.waiting_s > WAITING_S_MAX && { rank: 1, key: "sequencing",
      text: [`Sequencing stands still: the oldest unsequenced event is ${duration(cursor.waiting_s)} old`,
        stopped ? `: ${stopped}.` : blocker ? ", because a database session blocks it." : "."], action: runChecks() },
    alive.length && lapsed > 0 && { rank: 6, key: "lapsed",
      text: [`${plural(lapsed, "relay")} with an expired lease; ${count(alive.length)} running.`], action: runChecks() },
  ];
}

function blockedItem(each, at) {
  const { block, blocked_lanes: lanes } = each;
  const since = block ? ` for ${duration((Date.parse(at) - Date.parse(block.since)) / 1000)}` : "";
  return { rank: 2, key: `blocked ${each.name}`, text: [endpointLink(each),
    `: ${plural(lanes, "lane is", "lanes are")} blocked by a dead letter${since}; ${plural(each.pending, "delivery", "deliveries")} pending.`],
  action: [block?.dead_letter && h("a", { class: "button", href: link("dead-letter", [String(block.dead_letter)]) }, `Dead letter ${block.dead_letter}`),
    button("Resume…", () => readAndResume(each.name))] };
}

// One item for the endpoint's lane that fails longest; degraded endpoints have other lanes that deliver.
function failingItem(each, at) {
  const { failing } = each;
  const last = responseLine(failing.last_response);
  const rejecting = each.health?.state === "rejecting";
  return { rank: rejecting ? 3 : each.condition === "degraded" ? 5 : 4, key: `failing ${each.name}`, text: [endpointLink(each),
    `: ${rejecting ? "its receiver refuses every delivery" : plural(each.failing_lanes, "lane is failing", "lanes are failing")}${each.failing_since ? ` for ${duration((Date.parse(at) - Date.parse(each.failing_since)) / 1000)}` : ""}, after `,
    `${plural(failing.attempts, "attempt")}${last ? `, last response ${last}` : ""}; ${plural(each.pending, "delivery", "deliveries")} pending. `,
    failing.event && h("a", { href: link("trace", [failing.event]) }, "Trace the event")],
  action: [retryAction(each.name),
    failing.skip_requested ? null : stuckAction(each.name, { name: failing.lane, sequence: failing.sequence, last_response: failing.last_response },
      { health: each.health?.state ?? "healthy", failingLanes: each.failing_lanes }) ?? pauseAction(each.name, failing.last_response)] };
}

// Its backlog grows until it is resumed.
function pausedItem(each, at) {
  const since = duration((Date.parse(at) - Date.parse(each.state_at)) / 1000);
  return { rank: 6, key: `paused ${each.name}`, text: [endpointLink(each),
    `: paused ${since} ago${each.state_by ? ` by ${each.state_by}` : ""}${each.state_comment ? ` (${each.state_comment})` : ""}; ${plural(each.pending, "delivery", "deliveries")} pending.`],
  action: button("Resume…", () => readAndResume(each.name)) };
}

const itemsOf = (each, at) => [
  each.blocked_lanes > 0 && blockedItem(each, at),
  each.state === "active" && each.failing && failingItem(each, at),
  each.state === "paused" && each.pending > 0 && pausedItem(each, at),
  each.state === "disabled" && each.pending > 0 && { rank: 5, key: `disabled ${each.name}`,
    text: [endpointLink(each), `: disabled, with ${plural(each.pending, "delivery", "deliveries")} pending.`], action: null },
  each.dead_letters > 0 && { rank: 7, key: `dead ${each.name}`,
    text: [endpointLink(each), `: ${plural(each.dead_letters, "dead letter waits", "dead letters wait")} for a decision.`],
    action: deadLetters({ endpoint: each.name }, "Replay or discard…") },
];

// Problems one by one; warnings, which may be there for long, in one item after all others.
function findingItems(findings) {
  const found = findings.filter((each) => !IN_STATUS.includes(each.check));
  const bySeverity = (severity) => found.filter((each) => each.severity === severity);
  const warnings = bySeverity("warning");
  return [
    ...bySeverity("problem").map((each, n) => ({ rank: 2, key: `problem ${each.check} ${n}`, action: runChecks(),
      text: [`${capital(each.check)}: ${each.message}.`, each.action && isOperator() ? h("small", null, ` To do: ${each.action}`) : null] })),
    warnings.length && { rank: 8, key: "warnings", action: runChecks(),
      text: [`${plural(warnings.length, "check has a warning", "checks have a warning")}: ${[...new Set(warnings.map((each) => each.check))].join(", ")}.`] },
  ];
}

// `status` is that of GET /v1/status, or for a tenant of GET /v1/endpoint-statuses; `findings` are of GET /v1/doctor.
export function attention(status, findings) {
  const items = [
    ...(status.replicas ? relayItems(status) : []),
    ...status.endpoints.flatMap((each) => itemsOf(each, status.at)),
    ...findingItems(findings),
  ].filter(Boolean).sort((a, b) => a.rank - b.rank);
  const more = items.length - SHOWN_MAX;
  return h("section", { class: "attention", "aria-label": "Needs attention" },
    h("h2", null, items.length ? "Needs attention" : "Nothing needs attention."),
    items.length ? h("ul", null, items.slice(0, SHOWN_MAX).map((item) => h("li", { "data-key": item.key, class: item.rank < 5 ? "urgent" : "" },
      h("p", null, item.text), item.action ? h("div", { class: "actions" }, item.action) : null))) : null,
    more > 0 ? h("p", { class: "hint" }, `${plural(more, "more item", "more items")}: see `, h("a", { href: link("endpoints") }, "Endpoints"), ".") : null);
}
