// What is done with an endpoint.

import { goesOn } from "./again.js";
import { name, post } from "./api.js";
import { h } from "./dom.js";
import { answerLine, code, facts } from "./parts.js";
import { duration } from "./say.js";
import { act, ask, attempt, copied, field, why } from "./talk.js";

const path = (endpoint, verb) => `/v1/endpoints/${name(endpoint)}/${verb}`;

export async function simple(endpoint, verb, done) {
  await act(() => post(path(endpoint, verb), {}), done);
}

export async function pause(endpoint) {
  const told = await ask(`Pause ${endpoint}?`, [h("p", null, "Nothing is sent until it is resumed; events go on being numbered and kept."), why()], { yes: "Pause" });
  if (told) await act(() => post(path(endpoint, "pause"), { why: told.why || null }), `${endpoint} is paused.`);
}

// Lanes that wait for a dead letter go on with it, whatever it is asked for.
const letGo = (blocked) => [goesOn(blocked), h("p", { class: "hint" }, "The dead letters stay, and can be sent again or set aside later.")];

export async function resume(endpoint, blocked) {
  if (blocked.length && !await ask(`Resume ${endpoint}?`, letGo(blocked), { yes: "Resume" })) return;
  await simple(endpoint, "resume", `${endpoint} goes on.`);
}

export async function goOn(endpoint, blocked) {
  const told = await ask(`Let the blocked lanes of ${endpoint} go on?`,
    [letGo(blocked), h("p", { class: "hint" }, "If the endpoint is failing, it is tried at once, too."), why()], { yes: "Let them go on" });
  if (told) await act(() => post(path(endpoint, "resume"), { why: told.why || null }), `The lanes of ${endpoint} go on.`);
}

export async function rotate(endpoint) {
  const told = await ask(`A new secret for ${endpoint}?`, [
    h("p", null, "Deliveries are signed with both secrets until the old one ends."),
    field("The old one goes on for", h("select", { name: "overlap" },
      [["24h", "a day"], ["7d", "a week"], ["1h", "an hour"], ["0s", "not at all"]].map(([value, text]) => h("option", { value }, text)))),
  ], { yes: "Make it" });
  if (!told) return;
  const made = await act(() => post(path(endpoint, "rotate-secret"), { overlap: told.overlap }), "A new secret was made.");
  if (made) {
    const isPublic = made.secret.startsWith("whpk_");
    await ask(`The new ${isPublic ? "public key" : "secret"} of ${endpoint}`, [
      h("p", null, isPublic ? "Give it to the receiver now." : "It is shown this once. Give it to the receiver now."),
      copied(isPublic ? "Public key" : "Secret", made.secret)], { yes: "I have it", no: null, sure: true });
  }
}

// What the relay would make of such an answer.
const OUTCOME = {
  delivered: "It would be delivered",
  retried: "It would be tried again later",
  dead_letter: "It would be a dead letter at once",
  disabled: "It would be a dead letter, and the endpoint would be disabled",
};

export async function test(endpoint) {
  const told = await attempt(() => post(path(endpoint, "test")));
  if (!told) return;
  await ask(`What ${endpoint} answered`, [
    h("p", { class: "said" }, answerLine(told) ?? "nothing"),
    h("p", null, told.outcome === "delivered" ? "It was delivered." : `${OUTCOME[told.outcome] ?? told.outcome}.`),
    facts([["Sent to", h("span", { class: "url" }, told.url)], ["Took", duration(told.elapsed_ms / 1000)]]),
    told.headers && h("details", null, h("summary", null, "Headers"), code(told.headers)),
    told.body && h("details", null, h("summary", null, "Body"), code(told.body)),
  ].filter(Boolean), { yes: "Close", no: null });
}
