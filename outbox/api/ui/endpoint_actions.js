// Actions on an endpoint: pause, resume, unblock, skip, rotate the secret, test.

import { describeUnblocking } from "./dead_letter_actions.js";
import { name, post } from "./api.js";
import { h } from "./dom.js";
import { code, definitionList, responseLine } from "./components.js";
import { duration, plural } from "./format.js";
import { link } from "./router.js";
import { comment, confirm, copyable, field, runAction, tryRequest } from "./dialogs.js";

const path = (endpoint, verb) => `/v1/endpoints/${name(endpoint)}/${verb}`;

export async function runVerb(endpoint, verb, success) {
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

export async function unblock(endpoint, blocked) {
  const form = await confirm(`Unblock the lanes of ${endpoint}?`,
    [unblockingNotes(blocked), h("p", { class: "hint" }, "A failing endpoint is retried immediately."), comment()], { yes: "Unblock" });
  if (form) await runAction(() => post(path(endpoint, "resume"), { comment: form.comment || null }), `The lanes of ${endpoint} are unblocked.`);
}

// Give up the delivery that a lane is stuck on.
export async function skip(endpoint, lane) {
  const sequence = lane.acked_seq + 1;
  const behind = lane.last_seq - sequence;
  const form = await confirm(`Skip sequence ${sequence}?`, [
    h("p", null, `Lane ${lane.name} goes on${behind ? `: ${plural(behind, "delivery waits", "deliveries wait")} behind it` : ""}.`),
    h("p", { class: "hint" }, "It becomes a dead letter, which you can replay later. A request in flight completes first."), comment()],
  { yes: "Skip", kind: "danger" });
  if (!form) return;
  await runAction(() => post(path(endpoint, "skip"), { lane: lane.name, sequence, comment: form.comment || null }), (result) => (result.dead_letter
    ? ["Skipped: ", h("a", { href: link("dead-letter", [String(result.dead_letter)]) }, `dead letter ${result.dead_letter}`), "."]
    : "It will be skipped as soon as a relay delivers to the endpoint."));
}

export async function rotateSecret(endpoint) {
  const form = await confirm(`Rotate the signing secret of ${endpoint}?`, [
    h("p", null, "Deliveries are signed with both secrets until the old one expires."),
    field("Expire the old secret after", h("select", { name: "overlap" },
      [["24h", "1 day"], ["7d", "7 days"], ["1h", "1 hour"], ["0s", "immediately"]].map(([value, text]) => h("option", { value }, text)))),
  ], { yes: "Create" });
  if (!form) return;
  const rotation = await runAction(() => post(path(endpoint, "rotate-secret"), { overlap: form.overlap }), "The new secret is active.");
  if (rotation) {
    const isPublic = rotation.secret.startsWith("whpk_");
    await confirm(`New ${isPublic ? "public key" : "secret"} of ${endpoint}`, [
      h("p", null, isPublic ? "Configure it in the receiver now." : "The secret is shown only once. Configure it in the receiver now."),
      copyable(isPublic ? "Public key" : "Secret", rotation.secret)], { yes: "Done", no: null, persistent: true });
  }
}

const TEST_OUTCOMES = {
  delivered: "The relay counts this as delivered",
  retried: "The relay would retry this delivery",
  dead_letter: "The relay would dead-letter this delivery immediately",
  disabled: "The relay would dead-letter this delivery and disable the endpoint",
};

export async function sendTest(endpoint) {
  const result = await tryRequest(() => post(path(endpoint, "test")));
  if (!result) return;
  await confirm(`Test response of ${endpoint}`, [
    h("p", { class: "response" }, responseLine(result.response) ?? "no response"),
    h("p", null, `${TEST_OUTCOMES[result.outcome] ?? result.outcome}.`),
    definitionList([["URL", h("span", { class: "url" }, result.url)], ["Duration", duration(result.response.elapsed_ms / 1000)]]),
    result.response.headers && h("details", null, h("summary", null, "Headers"), code(result.response.headers)),
    result.response.body && h("details", null, h("summary", null, "Body"), code(result.response.body)),
  ].filter(Boolean), { yes: "Close", no: null });
}
