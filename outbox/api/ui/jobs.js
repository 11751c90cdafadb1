// Replay jobs: how far each is, and what it waits for.

import { get, post } from "./api.js";
import { h } from "./dom.js";
import { badge, button, row, table, when } from "./parts.js";
import { link } from "./places.js";
import { count, plural } from "./say.js";
import { act } from "./talk.js";

const HEADS = ["Job", "State", "Of", "Asked", "Progress", ""];
const SHOWN_MAX = 20;

// Jobs that this tab saw or asked for: the API lists what runs, and their end is told as well.
const followed = new Map();

export function follow(id) {
  if (id && !followed.has(id)) followed.set(id, null);
}

async function ended(id, signal) {
  const seen = followed.get(id);
  if (seen && seen.state !== "running") return seen;
  const job = await get(`/v1/replays/${id}`, {}, signal);
  followed.set(id, job);
  return job;
}

// Everything of it has a number in a lane, and some of that is not delivered yet.
const onTheWay = (job) => job.state === "running" && job.all > 0 && job.done >= job.all;

// The running ones, and those that ended meanwhile; and which endpoints have a blocked lane.
export async function look(signal) {
  const { items } = await get("/v1/replays", { limit: SHOWN_MAX }, signal);
  items.forEach((job) => followed.set(job.id, job));
  const running = new Set(items.map((job) => job.id));
  const rest = await Promise.all([...followed.keys()].filter((id) => !running.has(id)).slice(-SHOWN_MAX).map((id) => ended(id, signal)));
  const all = [...items, ...rest].sort((a, b) => b.id - a.id);
  const seen = all.some(onTheWay) ? await get("/v1/live", { endpoints: 200 }, signal) : { endpoints: [] };
  return { all, blocked: seen.endpoints.filter((each) => each.lanes.some((lane) => lane.blocked)).map((each) => each.name) };
}

function progress(job, blocked) {
  if (onTheWay(job)) {
    const stuck = job.endpoint ? blocked.filter((each) => each === job.endpoint) : blocked;
    return h("span", null, `all ${count(job.all)} in their lanes, on the way at ${plural(job.open, "endpoint")}`,
      stuck.length ? ["; lanes are blocked at ", stuck.map((each, n) => [n ? ", " : "", h("a", { href: link("endpoint", [each]) }, each)])] : null);
  }
  const stopped = Object.entries(job.stopped ?? {}).map(([reason, n]) => `; ended early at ${plural(n, "endpoint")}: ${reason}`).join("");
  if (!job.all) return count(job.taken);
  return h("span", null, h("progress", { max: job.all, value: job.done, "aria-label": "Progress" }), ` ${count(job.done)} of ${count(job.all)}${stopped}`);
}

function what(job) {
  if (job.kind === "history") return `history of ${job.endpoint}`;
  if (job.kind === "lane") return `numbers ${count(job.from_sequence)} to ${count(job.to_sequence)} of lane ${job.lane}, for its receiver`;
  return job.endpoint ? `dead letters of ${job.endpoint}` : "dead letters";
}

export function draw({ all, blocked }) {
  if (!all.length) return null;
  return h("section", { id: "jobs" }, h("h2", null, "Being sent again"), table(HEADS, all.map((job) => row([
    String(job.id), badge(onTheWay(job) ? "on the way" : job.state),
    what(job),
    h("span", null, when(job.asked_at), ` by ${job.asked_by}`),
    progress(job, blocked),
    job.state === "running" ? button("Abort", () => act(() => post(`/v1/replays/${job.id}/abort`), `Job ${job.id} takes nothing more.`)) : null,
  ], HEADS, job.id)), ""));
}
