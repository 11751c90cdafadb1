// Pause, resume or enable many endpoints: a dry run of all of them, then a request for each part.

import { get, post } from "./api.js";
import { comment, confirm, notice, tryRequest } from "./dialogs.js";
import { h } from "./dom.js";
import { plural } from "./format.js";

// The API's limits: names in a request, and endpoints on a page of the listing.
const NAMES_MAX = 200;
const PAGE_MAX = 1000;
const REASONS_SHOWN = 3;

const VERBS = {
  pause: { title: "Pause", changed: "paused", already: "are paused already", hint: "Deliveries stop until you resume them. New events stay pending, in order." },
  resume: { title: "Resume", changed: "resumed", already: "are not paused and are retried at once", retries: true,
    hint: "Lanes that a dead letter blocks continue. The dead letters are kept." },
  enable: { title: "Enable", changed: "enabled", already: "are enabled already", hint: "They receive events that are sequenced from now on." },
};

const endpoints = (n) => plural(n, "endpoint");
const are = (n) => (n === 1 ? "is" : "are");

// The names of all endpoints that match a filter.
async function readNames(filter) {
  const names = [];
  let after = null;
  do {
    const page = await get("/v1/endpoints", { ...filter, limit: PAGE_MAX, after });
    names.push(...page.items.map((each) => each.name));
    after = page.next;
  } while (after !== null);
  return names;
}

const emptyResult = () => ({ changed: [], unchanged: [], rejected: {}, unblocked: 0 });

// One request for each part; `sum` is the result so far.
async function send(verb, names, body, sum = emptyResult()) {
  for (let first = 0; first < names.length; first += NAMES_MAX) {
    const part = await post(`/v1/endpoints/${verb}`, { ...body, names: names.slice(first, first + NAMES_MAX) });
    sum.changed.push(...part.changed);
    sum.unchanged.push(...part.unchanged);
    Object.assign(sum.rejected, part.rejected);
    sum.unblocked += part.unblocked;
  }
  return sum;
}

function describeRejected(rejected) {
  const reasons = Object.values(rejected);
  if (!reasons.length) return null;
  return [h("p", null, `${endpoints(reasons.length)} ${are(reasons.length)} left as ${reasons.length === 1 ? "it is" : "they are"}:`),
    h("ul", null, reasons.slice(0, REASONS_SHOWN).map((reason) => h("li", null, reason)),
      reasons.length > REASONS_SHOWN ? h("li", null, `and ${reasons.length - REASONS_SHOWN} more`) : null)];
}

// Change the endpoints that a dry run has counted, and no others.  `filter` selects all that match it; null: `names`.
export async function changeEndpoints(verb, names, filter) {
  const { title, changed: done, already, retries, hint } = VERBS[verb];
  const plan = await tryRequest(async () => send(verb, filter ? await readNames(filter) : names, { dry_run: true }));
  if (!plan) return false;
  const chosen = retries ? [...plan.changed, ...plan.unchanged] : plan.changed;
  if (!chosen.length) {
    const [reason] = Object.values(plan.rejected);
    notice(reason ? `No endpoint is ${done}: ${reason}.` : `No endpoint is ${done}: ${endpoints(plan.unchanged.length)} ${already}.`, "bad");
    return false;
  }
  const result = await confirm(`${title} ${endpoints(chosen.length)}?`, [
    plan.changed.length ? h("p", null, `${endpoints(plan.changed.length)} will be ${done}.`) : null,
    plan.unchanged.length ? h("p", null, `${endpoints(plan.unchanged.length)} ${already}.`) : null,
    plan.unblocked ? h("p", null, `${plural(plan.unblocked, "lane")} will be unblocked.`) : null,
    describeRejected(plan.rejected),
    h("p", { class: "hint" }, hint), comment()],
  { yes: `${title} ${endpoints(chosen.length)}`, send: async (form) => {
    const sum = emptyResult();
    try {
      return await send(verb, chosen, { comment: form.comment || null }, sum);
    } catch (error) {
      // What was done is kept, and the same request can be repeated.
      const n = sum.changed.length;
      throw n ? new Error(`${endpoints(n)} of ${chosen.length} ${are(n)} ${done}; then: ${error.message}`) : error;
    } finally {
      dispatchEvent(new Event("acted"));
    }
  } });
  if (!result) return false;
  const n = result.changed.length;
  notice([n && `${endpoints(n)} ${are(n)} ${done}.`, retries && result.unchanged.length && `${endpoints(result.unchanged.length)} ${are(result.unchanged.length)} retried at once.`,
    result.unblocked && `${plural(result.unblocked, "lane")} ${are(result.unblocked)} unblocked.`].filter(Boolean).join(" ") || "Nothing was changed.");
  return true;
}
