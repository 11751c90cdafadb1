// Replay and discard dead letters, with a preview of the effect.

import { get, name, post } from "./api.js";
import { h } from "./dom.js";
import { link } from "./router.js";
import { clock, count, plural } from "./format.js";
import { comment, confirm, field, runAction, tryRequest } from "./dialogs.js";

// Maximum number of endpoints read for one confirmation.
const ENDPOINTS_READ_MAX = 5;

const blocks = (deadLetter, lane) => lane.blocked_seq !== null && lane.name === deadLetter.lane
  && deadLetter.sequence <= lane.blocked_seq && lane.blocked_seq <= deadLetter.to_sequence;

// Find the lanes that are blocked by one of these dead letters.
async function findBlockedLanes(deadLetters) {
  const names = [...new Set(deadLetters.map((each) => each.endpoint))].slice(0, ENDPOINTS_READ_MAX);
  // A failed read must not prevent the action: the confirmation omits those lanes.
  const details = await Promise.all(names.map((each) => get(`/v1/endpoints/${name(each)}`).catch(() => ({ lanes: [] }))));
  return details.flatMap((each) => each.lanes).filter((lane) => deadLetters.some((each) => blocks(each, lane)));
}

// Describe which lanes resume and how many deliveries are pending on them.
export function describeUnblocking(lanes) {
  if (!lanes.length) return null;
  const pending = lanes.reduce((sum, lane) => sum + lane.last_seq - lane.acked_seq, 0);
  const behind = pending ? plural(pending, "pending delivery", "pending deliveries") : "no pending deliveries";
  return h("p", null, `This unblocks ${plural(lanes.length, "lane")} with ${behind}.`);
}

const jobStarted = (text, job) => [text, job && [" Progress: ", h("a", { href: link("dead-letters") }, `job ${job}`), "."]];

// The selection that a dry run has counted: without what is dead-lettered later.
const asCounted = ({ all, ...body }, until, counted) => (until ? { ...body, until, counted } : { ...body, all });

const laterOnes = (until) => until && h("p", { class: "hint" }, `Counted at ${clock(until)}. What is dead-lettered later is not included.`);

const ENDPOINTS_NAMED_MAX = 5;

function byEndpoint(counts) {
  const found = Object.entries(counts).sort(([, a], [, b]) => b - a);
  if (found.length < 2) return null;
  const more = found.length - ENDPOINTS_NAMED_MAX;
  return h("p", { class: "hint" }, found.slice(0, ENDPOINTS_NAMED_MAX).map(([endpoint, n]) => `${endpoint}: ${count(n)}`).join(", "),
    more > 0 ? ` and ${plural(more, "more endpoint")}` : "");
}

// `deadLetters` are the rows on this page that `body` selects.  Returns whether something was requested.
export async function replay(selection, body, deadLetters) {
  const [plan, lanes] = await Promise.all([tryRequest(() => post("/v1/dead-letters/replay", { ...body, dry_run: true })), findBlockedLanes(deadLetters)]);
  if (!plan) return false;
  const form = await confirm(`Replay ${selection}?`, [
    h("p", null, `${plural(plan.replaying, "dead letter")} will be sent again.`), byEndpoint(plan.by_endpoint),
    Object.entries(plan.skipped).map(([reason, n]) => h("p", null, `${count(n)} skipped: ${reason}.`)),
    describeUnblocking(lanes), laterOnes(plan.until),
    h("p", { class: "hint" }, "Each replayed delivery gets a new sequence number at the end of its lane and refers to the original. Attempts start at zero. Live events have priority."),
    field("Maximum rate (deliveries per second)", h("input", { name: "rate", type: "number", min: "0.1", step: "any" }), "Leave empty for no limit."),
  ], { yes: "Replay" });
  if (!form) return false;
  const rate = form.rate ? { rate: Number(form.rate) } : {};
  const chosen = asCounted(body, plan.until, plan.replaying);
  return Boolean(await runAction(() => post("/v1/dead-letters/replay", { ...chosen, ...rate }), (result) => {
    return jobStarted(`Replaying ${plural(result.replaying, "dead letter")}.`, result.job);
  }));
}

export async function discard(selection, body, deadLetters) {
  const [plan, lanes] = await Promise.all([tryRequest(() => post("/v1/dead-letters/discard", { ...body, dry_run: true })), findBlockedLanes(deadLetters)]);
  if (!plan) return false;
  const form = await confirm(`Discard ${selection}?`, [
    h("p", null, `${plural(plan.discarded, "dead letter")} will never be sent. The receiver keeps a gap at these sequence numbers.`),
    describeUnblocking(lanes), laterOnes(plan.until), comment()],
  { yes: "Discard", kind: "danger" });
  if (!form) return false;
  const chosen = asCounted(body, plan.until, plan.discarded);
  return Boolean(await runAction(() => post("/v1/dead-letters/discard", { ...chosen, comment: form.comment || null }),
    (result) => `${plural(result.discarded, "dead letter")} discarded. The journal has an entry.`));
}

// Replay or discard one dead letter that is not on this page.
async function withLetter(id, act) {
  const each = await tryRequest(() => get(`/v1/dead-letters/${id}`));
  if (each) await act(`dead letter ${id}`, { ids: [id] }, [each]);
}

export const replayOne = (id) => withLetter(id, replay);
export const discardOne = (id) => withLetter(id, discard);
