// Schedules and their next runs.

import { get, name, post, remove, session } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { badge, button, heading, isOperator, row, table, when } from "../components.js";
import { link } from "../router.js";
import { clock, count, duration, time } from "../format.js";
import { addSchedule, editSchedule } from "../schedule_form.js";
import { comment, confirm, runAction } from "../dialogs.js";

const HEADS = ["Schedule", "State", "When", "Type", "Next run", "Last run", ""];
const FUTURE_MAX = 10000;
// A scheduled run is published within two seconds.
const LATE_MS = 3000;
const DAY_MS = 86400000;

async function pause(schedule) {
  const form = await confirm(`Pause ${schedule}?`, comment(), { yes: "Pause" });
  if (form) await runAction(() => post(`/v1/schedules/${name(schedule)}/pause`, { comment: form.comment || null }), `${schedule} is paused.`);
}

async function removeSchedule(schedule) {
  if (await confirm(`Remove ${schedule}?`, h("p", null, "It publishes no further events."), { yes: "Remove", kind: "danger" })) {
    await runAction(() => remove(`/v1/schedules/${name(schedule)}`), `${schedule} is removed.`);
  }
}

async function runNow(schedule) {
  if (await confirm(`Run ${schedule} now?`, h("p", null, "Publishes its event now. The schedule does not change."), { yes: "Run" })) {
    await runAction(() => post(`/v1/schedules/${name(schedule)}/run-now`), `${schedule} has run.`);
  }
}

// Misfire policy, when several runs were missed.
const MISSED = {
  once: "only the newest missed run is published",
  all: "later missed runs are published as well",
};

function nextRun(each, now) {
  if (each.state !== "active" || !each.next_at) return "–";
  const at = Date.parse(each.next_at);
  if (now - at < LATE_MS) return h("time", { datetime: each.next_at, title: each.next_runs.map(time).join("\n") }, when(each.next_at).textContent);
  const run = now - at < DAY_MS ? clock(at) : time(at);
  const missed = each.misfire === "skip" ? `it is skipped when more than ${duration(each.grace_s)} late`
    : Date.parse(each.next_runs[1]) <= now ? MISSED[each.misfire] : null;
  return h("span", null, h("time", { datetime: each.next_at, title: time(each.next_at) }, `overdue for ${duration((now - at) / 1000)}`),
    h("small", null, "; ", [`the run of ${run} is pending`, missed, each.waits && "it waits for the previous run's deliveries"].filter(Boolean).join("; ")));
}

const lastRun = (each) => (each.last_event
  ? h("a", { href: link("trace", [each.last_event]) }, when(each.last_run_at)) : when(each.last_run_at));

function describeFuture({ events, first_at: first }) {
  if (!events) return "No scheduled events.";
  return events === 1 ? `1 scheduled event, due ${time(first)}.`
    : `${events > FUTURE_MAX ? `More than ${count(FUTURE_MAX)}` : count(events)} scheduled events, the first due ${time(first)}.`;
}

export function view(place) {
  show(place, h("h1", null, "Schedules"), h("p", { class: "empty" }, "Loading…"));
  return live(place, async (signal) => {
    const page = await get("/v1/schedules", { limit: 500 }, signal);
    const now = session.now();
    show(place, heading("Schedules", button("New schedule", addSchedule, { kind: "main" })),
      table(HEADS, page.items.map((each) => row([
        each.name, badge(each.state, each.state_comment), h("span", null, h("code", null, each.cron), ` ${each.timezone}`), each.type,
        nextRun(each, now), lastRun(each),
        h("div", { class: "actions" },
          each.state === "paused" ? button("Resume", () => runAction(() => post(`/v1/schedules/${name(each.name)}/resume`, {}), `${each.name} is resumed.`))
            : button("Pause", () => pause(each.name)),
          button("Edit", () => editSchedule(each.name)), button("Run now", () => runNow(each.name)), button("Remove", () => removeSchedule(each.name))),
      ], HEADS, each.name)), ["No schedules yet.", isOperator() && [" A schedule publishes an event again and again: ", h("code", null, "outbox schedule add nightly '0 3 * * *' --type report.nightly")]]),
      page.future_events && h("p", { class: "hint" }, describeFuture(page.future_events)));
  }, { every: 5000 });
}
