// Actions on an endpoint and its lanes: pause, resume, unblock, skip, refill, adopt.

import { describeUnblocking } from "./dead_letter_actions.js";
import { get, name, post } from "./api.js";
import { h } from "./dom.js";
import { responseLine } from "./components.js";
import { plural } from "./format.js";
import { link } from "./router.js";
import { choice, comment, confirm, runAction, tryRequest } from "./dialogs.js";

const path = (endpoint, verb) => `/v1/endpoints/${name(endpoint)}/${verb}`;

async function runVerb(endpoint, verb, success) {
  await runAction(() => post(path(endpoint, verb), {}), success);
}

export async function pause(endpoint) {
  const form = await confirm(`Pause ${endpoint}?`, [h("p", null, "Deliveries stop until you resume the endpoint. New events stay pending, in order."), comment()], { yes: "Pause" });
  if (form) await runAction(() => post(path(endpoint, "pause"), { comment: form.comment || null }), `${endpoint} is paused.`);
}

// Resuming an endpoint also unblocks its lanes.
const unblockingNotes = (blocked) => [describeUnblocking(blocked), h("p", { class: "hint" }, "The dead letters are kept. You can replay or discard them later.")];

export async function resume(endpoint, blocked) {
  if (blocked.length && !await confirm(`Resume ${endpoint}?`, unblockingNotes(blocked), { yes: "Resume" })) return;
  await runVerb(endpoint, "resume", `${endpoint} is resumed.`);
}

// Resume an endpoint that is not on this page.
export async function readAndResume(endpoint) {
  const detail = await tryRequest(() => get(`/v1/endpoints/${name(endpoint)}`));
  if (detail) await resume(endpoint, detail.lanes.filter((lane) => lane.blocked_seq !== null));
}

export async function unblock(endpoint, blocked) {
  const form = await confirm(`Unblock the lanes of ${endpoint}?`,
    [unblockingNotes(blocked), h("p", { class: "hint" }, "A failing endpoint is retried immediately."), comment()], { yes: "Unblock" });
  if (form) await runAction(() => post(path(endpoint, "resume"), { comment: form.comment || null }), `The lanes of ${endpoint} are unblocked.`);
}

// Retry the failing lanes now, although their next attempts are due later.
export const retryNow = (endpoint) => runVerb(endpoint, "resume", `${endpoint} is retried now, one request at a time at first.`);

// Dead-letter the delivery that a lane is stuck on.
export async function skip(endpoint, { name: lane, sequence, behind = 0, last_response: last }) {
  const form = await confirm(`Skip sequence ${sequence} of ${endpoint}?`, [
    last ? h("p", null, `It failed, the last time with ${responseLine(last)}.`) : null,
    h("p", null, `Lane ${lane} continues${behind ? `: ${plural(behind, "delivery waits", "deliveries wait")} behind it` : ""}.`),
    h("p", { class: "hint" }, "It becomes a dead letter, which you can replay later. Later events with its key are delivered without it, and may fail the same way. A request in flight completes first."), comment()],
  { yes: "Skip", kind: "danger" });
  if (!form) return;
  await runAction(() => post(path(endpoint, "skip"), { lane, sequence, comment: form.comment || null }), (result) => (result.dead_letter
    ? ["Skipped: ", h("a", { href: link("dead-letter", [String(result.dead_letter)]) }, `dead letter ${result.dead_letter}`), "."]
    : "It will be skipped as soon as a relay delivers to the endpoint."));
}

// Let the relay append again what a broker's stream has lost.
export async function refill(endpoint) {
  const form = await confirm(`Refill the streams of ${endpoint}?`, [
    h("p", null, "The relay appends again what the streams have lost, up to the last delivered sequence, and then continues."),
    h("p", { class: "hint" }, "Nothing is appended to a stream that has lost nothing."), comment()], { yes: "Refill" });
  if (!form) return;
  await runAction(() => post(path(endpoint, "refill"), { comment: form.comment || null }),
    (result) => `The relay refills ${plural(result.lanes.length, "lane")} of ${endpoint}.`);
}

const ADOPTIONS = {
  continue: "continues without what its stream has lost",
  take_over: "takes its stream over",
  dead_letter: "ends, and newer lanes begin",
};

// Let the relay go on with the streams of a broker as they are.
export async function adopt(endpoint) {
  const plan = await tryRequest(() => post(path(endpoint, "adopt"), { dry_run: true }));
  if (!plan) return;
  const lanes = plan.lanes.map((lane) => h("li", null, h("code", null, lane.lane), ` (${lane.held}) ${ADOPTIONS[lane.action]}`,
    lane.dead_letters_max ? `; up to ${plural(lane.dead_letters_max, "delivery becomes a dead letter", "deliveries become dead letters")}` : ""));
  const form = await confirm(`Adopt the streams of ${endpoint}?`, [
    h("p", null, "The relay continues with the streams as they are:"), h("ul", null, lanes),
    h("p", { class: "hint" }, "Stop other relays that append to the same streams first. Dead letters can be replayed later."), comment()],
  { yes: "Adopt", kind: "danger" });
  if (!form) return;
  await runAction(() => post(path(endpoint, "adopt"), { comment: form.comment || null }),
    (result) => `The relay adopts ${plural(result.lanes.length, "stream")} of ${endpoint}.`);
}

export async function enable(endpoint) {
  const form = await confirm(`Enable ${endpoint}?`, [h("fieldset", { class: "field" }, h("legend", null, "What it has missed"),
    choice("missed", "send", "Send it first", "What was pending when it was disabled, and what was published since, in order and before newer events.", true),
    choice("missed", "skip", "Do not send it", "It receives new events only. What was pending stays in its dead letters.", false)), comment()], { yes: "Enable" });
  if (!form) return;
  await runAction(() => post(path(endpoint, "enable"), { catch_up: form.missed === "send", comment: form.comment || null }), (result) => (result.catches_up_pending === null
    ? `${endpoint} is enabled. It receives new events.`
    : `${endpoint} is enabled. It first gets what it has missed.`));
}
