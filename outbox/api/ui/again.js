// What is done with dead letters: they are sent again, or set aside.

import { get, name, post } from "./api.js";
import { h } from "./dom.js";
import { follow } from "./jobs.js";
import { link } from "./places.js";
import { count, plural } from "./say.js";
import { act, ask, attempt, field, why } from "./talk.js";

// Endpoints whose lanes are looked at, for a question.
const LOOKED_AT_MAX = 5;

const stops = (letter, lane) => lane.blocked_seq !== null && lane.name === letter.lane
  && letter.sequence <= lane.blocked_seq && lane.blocked_seq <= letter.to_sequence;

// The lanes that wait for one of these dead letters.
export async function waitingFor(letters) {
  const names = [...new Set(letters.map((each) => each.endpoint))].slice(0, LOOKED_AT_MAX);
  // One that is gone, or that cannot be asked now, does not stand in the way of the question.
  const found = await Promise.all(names.map((each) => get(`/v1/endpoints/${name(each)}`).catch(() => ({ lanes: [] }))));
  return found.flatMap((each) => each.lanes).filter((lane) => letters.some((letter) => stops(letter, lane)));
}

// That lanes go on, and how much is behind: the one thing that a decision sets in motion.
export function goesOn(lanes) {
  if (!lanes.length) return null;
  const owed = lanes.reduce((sum, lane) => sum + lane.last_seq - lane.acked_seq, 0);
  const many = lanes.length > 1;
  const behind = owed ? `${plural(owed, "delivery", "deliveries")} behind ${many ? "them" : "it"}` : "nothing behind it yet";
  return h("p", null, many ? `${count(lanes.length)} lanes wait for this: they go on, with ${behind}.`
    : `A lane waits for this: it goes on, with ${behind}.`);
}

const done = (text, job) => [text, job && [" ", h("a", { href: link("dead") }, `Job ${job}`), " tells how far it is."]];

// `letters` are those that are known of what `body` means.
export async function replay(what, body, letters) {
  const [plan, lanes] = await Promise.all([attempt(() => post("/v1/dead-letters/replay", { ...body, dry_run: true })), waitingFor(letters)]);
  if (!plan) return;
  const told = await ask(`Send ${what} again?`, [
    h("p", null, `${plural(plan.replaying, "dead letter")} would be sent again.`),
    Object.entries(plan.skipped).map(([reason, n]) => h("p", null, `${count(n)} left alone: ${reason}.`)),
    goesOn(lanes),
    h("p", { class: "hint" }, "Each gets a new number at the end of its lane and names the one it stands for. Attempts begin at zero, and live events go first."),
    field("At most so many a second", h("input", { name: "rate", type: "number", min: "0.1", step: "any" }), "Empty: as fast as is good."),
  ], { yes: "Send again" });
  if (!told) return;
  const rate = told.rate ? { rate: Number(told.rate) } : {};
  await act(() => post("/v1/dead-letters/replay", { ...body, ...rate }), (came) => {
    follow(came.job);
    return done(`${plural(came.replaying, "dead letter")} will be sent again.`, came.job);
  });
}

export async function discard(what, body, letters) {
  const [plan, lanes] = await Promise.all([attempt(() => post("/v1/dead-letters/discard", { ...body, dry_run: true })), waitingFor(letters)]);
  if (!plan) return;
  const told = await ask(`Set ${what} aside?`, [
    h("p", null, `${plural(plan.discarded, "dead letter")} would never be sent. Receivers go on missing these numbers.`),
    goesOn(lanes), why()],
  { yes: "Discard", kind: "danger" });
  if (!told) return;
  await act(() => post("/v1/dead-letters/discard", { ...body, why: told.why || null }), "Discarded; it stands in the journal.");
}
