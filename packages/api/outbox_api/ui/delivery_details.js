// One delivery of a trace: what can be done with it, where it is, and its attempts.

import { badge, button, code, definitionList, row, table, when } from "./components.js";
import { discardOne, replayOne } from "./dead_letter_actions.js";
import { h } from "./dom.js";
import { sendAgain } from "./event_actions.js";
import { duration, time } from "./format.js";
import { link } from "./router.js";
import { stuckAction } from "./stuck_lane.js";

const ATTEMPTS = ["#Attempt", "When", "Duration", "Outcome", "Response", "Relay"];
const NARROW_ATTEMPTS = ["#No.", ...ATTEMPTS.slice(1, -1)];
const LETTER_FIXED = ["removed", "erased"];

export function deliveryActions(each, event) {
  const { dead_letter: letter, lane_state: lane } = each;
  const isStuck = lane && lane.head.attempts && lane.head.sequence === each.sequence && !lane.blocked_since;
  return h("div", { class: "actions" },
    letter?.state === "dead" && !LETTER_FIXED.includes(letter.reason) && button("Replay", () => replayOne(letter.id), { kind: "main" }),
    letter?.state === "dead" && button("Discard", () => discardOne(letter.id)),
    each.state === "delivered" && !event.erased_at && button("Send again…", () => sendAgain(each.endpoint, event)),
    isStuck && stuckAction(each.endpoint, { name: each.lane, ...lane.head }, { health: lane.health, failingLanes: lane.failing_lanes }),
    h("a", { class: "button", href: link("preview", [each.endpoint], { event: event.event_id }) }, "Preview and cURL"));
}

export const deliveryFacts = (each) => definitionList([["X-Delivery", h("code", null, each.delivery_id)],
  ["Endpoint", h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint)],
  each.dead_letter && ["Dead letter", h("a", { href: link("dead-letter", [String(each.dead_letter.id)]) }, `${each.dead_letter.id}, ${each.dead_letter.reason}`)]]);

// In a panel there is no room for all columns.
export function attempts(each, { narrow = false } = {}) {
  const heads = narrow ? NARROW_ATTEMPTS : ATTEMPTS;
  return table(heads, each.attempts.map((attempt) => row([
    String(attempt.attempt), narrow ? when(attempt.started_at) : h("time", { datetime: attempt.started_at }, time(attempt.started_at)),
    duration(attempt.elapsed_ms / 1000), badge(attempt.outcome),
    h("details", null, h("summary", null, `${attempt.status ?? ""} ${attempt.error ?? ""}`.trim() || "–"), attempt.response && code(attempt.response)),
    String(attempt.replica_id ?? "")].slice(0, heads.length), heads)), "No attempts yet.");
}
