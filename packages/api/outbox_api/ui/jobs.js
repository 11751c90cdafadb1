// Replay jobs and their progress.

import { get, post } from "./api.js";
import { h } from "./dom.js";
import { badge, button, row, table, when } from "./components.js";
import { link } from "./router.js";
import { count, plural } from "./format.js";
import { runAction } from "./dialogs.js";

const HEADS = ["Job", "State", "Replays", "Requested", "Deliveries", ""];
const SHOWN_MAX = 20;

// All deliveries have a sequence number in their lanes; some are still pending.
const isDelivering = (job) => job.state === "running" && job.all > 0 && job.done >= job.all;

// Read running jobs, the newest jobs, and the endpoints with a blocked lane.
export async function load(signal) {
  const pages = await Promise.all(["running", "all"].map((state) => get("/v1/replays", { state, limit: SHOWN_MAX }, signal)));
  const byId = new Map(pages.flatMap((page) => page.items).map((job) => [job.id, job]));
  const all = [...byId.values()].sort((a, b) => b.id - a.id);
  const live = all.some(isDelivering) ? await get("/v1/live", { endpoints: 200 }, signal) : { endpoints: [] };
  return { all, blocked: live.endpoints.filter((each) => each.lanes.some((lane) => lane.blocked)).map((each) => each.name) };
}

// A backfill knows how much it has searched, not how many deliveries it will find.
function deliveries(job, blocked) {
  if (isDelivering(job)) {
    const affected = job.endpoint ? blocked.filter((each) => each === job.endpoint) : blocked;
    return h("span", null, `all ${count(job.taken)} queued in their lanes, pending at ${plural(job.open, "endpoint")}`,
      affected.length ? ["; blocked lanes at ", affected.map((each, n) => [n ? ", " : "", h("a", { href: link("endpoint", [each]) }, each)])] : null);
  }
  const stopped = Object.entries(job.stopped ?? {}).map(([reason, n]) => `; stopped early at ${plural(n, "endpoint")}: ${reason}`).join("");
  const runs = job.state === "running" && job.all > 0;
  const taken = job.kind === "dead" && job.all ? `${count(job.taken)} of ${plural(job.all, "delivery", "deliveries")}` : plural(job.taken, "delivery", "deliveries");
  const erased = job.erased ? `, ${count(job.erased)} erased` : "";
  const searched = runs && job.kind === "history" ? `, about ${Math.floor(100 * job.done / job.all)} % searched` : "";
  return h("span", null, runs && h("progress", { max: job.all, value: job.done, "aria-label": "Progress" }), ` ${taken}${erased}${searched}${stopped}`);
}

function subject(job) {
  if (job.kind === "history") return `history of ${job.endpoint}`;
  return job.endpoint ? `dead letters of ${job.endpoint}` : "dead letters";
}

export function draw({ all, blocked }) {
  if (!all.length) return null;
  return h("section", { id: "jobs" }, h("h2", null, "Replay jobs"), table(HEADS, all.map((job) => row([
    String(job.id), badge(isDelivering(job) ? "delivering" : job.state),
    subject(job),
    h("span", null, when(job.requested_at), ` by ${job.requested_by}`),
    deliveries(job, blocked),
    job.state === "running" ? button("Abort", () => runAction(() => post(`/v1/replays/${job.id}/abort`), `Job ${job.id} is aborted.`)) : null,
  ], HEADS, job.id)), ""));
}
