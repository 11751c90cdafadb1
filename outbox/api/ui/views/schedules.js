// Events by the clock.

import { get, name, post, remove, session } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { badge, button, operator, row, table, when } from "../parts.js";
import { link } from "../places.js";
import { clock, count, duration, time } from "../say.js";
import { act, ask, why } from "../talk.js";

const HEADS = ["Schedule", "State", "When", "Type", "Next run", "Last run", ""];
const FUTURE_MAX = 10000;
// A tick is published within a second or two.
const LATE_MS = 3000;
const DAY_MS = 86400000;

async function pause(schedule) {
  const told = await ask(`Pause ${schedule}?`, why(), { yes: "Pause" });
  if (told) await act(() => post(`/v1/schedules/${name(schedule)}/pause`, { why: told.why || null }), `${schedule} is paused.`);
}

async function drop(schedule) {
  if (await ask(`Remove ${schedule}?`, h("p", null, "Nothing is published by it any more."), { yes: "Remove", kind: "danger" })) {
    await act(() => remove(`/v1/schedules/${name(schedule)}`), `${schedule} is gone.`);
  }
}

async function runNow(schedule) {
  if (await ask(`Run ${schedule} now?`, h("p", null, "Its event is published once more; its times stay as they are."), { yes: "Run" })) {
    await act(() => post(`/v1/schedules/${name(schedule)}/run-now`), `${schedule} was published.`);
  }
}

// What becomes of several runs that were missed.
const MISSED = {
  once: "of those missed since, the newest stands for all",
  all: "those missed since are owed, too",
};

function next(each, now) {
  if (each.state !== "active" || !each.next_at) return "–";
  const at = Date.parse(each.next_at);
  if (now - at < LATE_MS) return h("time", { datetime: each.next_at, title: each.next_runs.map(time).join("\n") }, when(each.next_at).textContent);
  const run = now - at < DAY_MS ? clock(at) : time(at);
  const missed = each.misfire === "skip" ? `it is left out when over ${duration(each.grace_s)} late`
    : Date.parse(each.next_runs[1]) <= now ? MISSED[each.misfire] : null;
  return h("span", null, h("time", { datetime: each.next_at, title: time(each.next_at) }, `due since ${duration((now - at) / 1000)}`),
    h("small", null, "; ", [`the run of ${run} is still owed`, missed, each.waits && "it waits until the last one has ended"].filter(Boolean).join("; ")));
}

const last = (each) => (each.last_event
  ? h("a", { href: link("trace", [each.last_event]) }, when(each.last_run_at)) : when(each.last_run_at));

function waiting({ events, first_at: first }) {
  if (!events) return "No future event waits.";
  return events === 1 ? `1 future event waits, until ${time(first)}.`
    : `${events > FUTURE_MAX ? `More than ${count(FUTURE_MAX)}` : count(events)} future events wait, the first until ${time(first)}.`;
}

export function view(place) {
  show(place, h("h1", null, "Schedules"), h("p", { class: "empty" }, "Looking…"));
  return live(place, async (signal) => {
    const told = await get("/v1/schedules", { limit: 500 }, signal);
    const now = session.now();
    show(place, h("h1", null, "Schedules"),
      table(HEADS, told.items.map((each) => row([
        each.name, badge(each.state, each.state_why), h("span", null, h("code", null, each.cron), ` ${each.timezone}`), each.type,
        next(each, now), last(each),
        h("div", { class: "actions" },
          each.state === "paused" ? button("Resume", () => act(() => post(`/v1/schedules/${name(each.name)}/resume`, {}), `${each.name} goes on.`))
            : button("Pause", () => pause(each.name)),
          button("Run now", () => runNow(each.name)), button("Remove", () => drop(each.name))),
      ], HEADS, each.name)), ["There is no schedule", operator() ? [": ", h("code", null, "outbox schedule add NAME CRON --type TYPE")] : null, "."]),
      told.future_events && h("p", { class: "hint" }, waiting(told.future_events)));
  }, { every: 5000 });
}
