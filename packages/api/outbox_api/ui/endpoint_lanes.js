// The lanes of an endpoint: those of the present generation, and older ones that end first.

import { get, session } from "./api.js";
import { attemptCount, responseLine, row, table, when } from "./components.js";
import { h } from "./dom.js";
import { count, plural } from "./format.js";
import { lanes } from "./lanes.js";
import { link } from "./router.js";
import { stuckAction } from "./stuck_lane.js";

const HEADS = ["Lane", "#Pending", "#Completed", "#Attempts", "Next attempt", "Last response", "Stuck"];
const ROWS_MAX = 64;
const BARS_MAX = 256;
const DEAD_LETTERS_MAX = 1000;

export const isBlocked = (lane) => lane.blocked_seq !== null;
const blockKey = (lane) => `${lane.name}/${lane.blocked_seq}`;
const pendingOf = (lane) => lane.last_seq - lane.acked_seq;

// Find the dead letters that block lanes, once each: a lane has their sequence numbers only.
export async function findBlockers(endpoint, blocked, known, signal) {
  const unknown = blocked.filter((lane) => !known.has(blockKey(lane)));
  if (!unknown.length) return;
  const { items } = await get("/v1/dead-letters", { endpoint, limit: DEAD_LETTERS_MAX }, signal);
  for (const lane of unknown) {
    const deadLetter = items.find((each) => each.lane === lane.name && each.sequence <= lane.blocked_seq && lane.blocked_seq <= each.to_sequence);
    known.set(blockKey(lane), deadLetter?.id ?? null);
  }
}

function stuck(endpoint, lane, known, { endpoint: { failing_lanes: failingLanes }, health }) {
  if (!isBlocked(lane)) {
    const next = { name: lane.name, sequence: lane.acked_seq + 1, behind: pendingOf(lane) - 1, last_response: lane.last_response };
    return lane.attempts ? stuckAction(endpoint, next, { health: health.state, failingLanes }) : "";
  }
  const id = known.get(blockKey(lane));
  return id ? h("a", { href: link("dead-letter", [String(id)]) }, `blocked by dead letter ${id}`)
    : h("a", { href: link("dead-letters", [], { endpoint }) }, `blocked at sequence ${lane.blocked_seq}`);
}

// While the circuit breaker is open or recovering, its probes decide, not the delivery's own retry time.
function nextAttempt({ endpoint: each, health, settings }, lane) {
  if (each.state !== "active" || isBlocked(lane) || !pendingOf(lane)) return "–";
  if (Date.parse(health.held_until ?? "") > session.now()) return when(health.held_until);
  if (health.state !== "healthy") return settings.probes ? "when a probe succeeds" : "when a delivery succeeds";
  if (!lane.next_attempt_at) return "–";
  return Date.parse(lane.next_attempt_at) <= session.now() ? "due" : when(lane.next_attempt_at);
}

export function laneSection(endpoint, detail, known) {
  const { generation } = detail.endpoint;
  const present = detail.lanes.filter((lane) => lane.generation === generation);
  const ending = detail.lanes.filter((lane) => lane.generation !== generation && (pendingOf(lane) || isBlocked(lane)));
  const shown = [...ending, ...present];
  const bars = shown.map((lane) => ({ pending: pendingOf(lane), failing: lane.attempts > 0, blocked: isBlocked(lane) }));
  const busy = shown.filter((lane) => pendingOf(lane) || isBlocked(lane));
  const more = ending.length ? h("small", null, `, and ${plural(ending.length, "older one")} whose deliveries go first`) : null;
  return h("section", null,
    h("h2", null, "Lanes ", h("small", null, count(present.length)), more),
    h("div", { class: "strip" }, lanes(endpoint, bars.slice(0, BARS_MAX), { all: shown.length })),
    busy.length ? table(HEADS, busy.slice(0, ROWS_MAX).map((lane) => row([
      h("code", null, lane.name), count(pendingOf(lane)),
      h("span", { title: "Acknowledged or dead-lettered" }, count(lane.acked_seq)),
      attemptCount(lane),
      nextAttempt(detail, lane), responseLine(lane.last_response) ?? "–", stuck(endpoint, lane, known, detail),
    ], HEADS, lane.name)), "") : null,
    busy.length > ROWS_MAX ? h("p", { class: "hint" }, `${count(busy.length - ROWS_MAX)} more lanes have pending deliveries.`) : null);
}
