// Events by the clock.

import { get, name, post, remove, session } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { link, pulse } from "../main.js";
import { act, ask, badge, button, row, table, why } from "../parts.js";
import { ago, count, time } from "../say.js";

const HEADS = ["Schedule", "State", "When", "Type", "Next run", "Last run", ""];

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

export function view(place) {
  show(place, h("h1", null, "Schedules"), h("p", { class: "empty" }, "Looking…"));
  return live(async (signal) => {
    const told = await get("/v1/schedules", { limit: 500 }, signal);
    const now = session.now();
    const future = told.future_events;
    show(place, h("h1", null, "Schedules"),
      table(HEADS, told.items.map((each) => row([
        each.name, badge(each.state, each.state_why), h("span", null, h("code", null, each.cron), ` ${each.timezone}`), each.type,
        each.state === "active" ? h("time", { datetime: each.next_at, title: each.next_runs.map(time).join("\n") }, ago(each.next_at, now)) : "–",
        each.last_event_id ? h("a", { href: link("trace", [each.last_event_id]) }, ago(each.last_run_at, now)) : "never",
        h("div", { class: "actions" },
          each.state === "paused" ? button("Resume", () => act(() => post(`/v1/schedules/${name(each.name)}/resume`, {}), `${each.name} goes on.`))
            : button("Pause", () => pause(each.name)),
          button("Run now", () => runNow(each.name)), button("Remove", () => drop(each.name))),
      ], HEADS)), "There is none: outbox schedule add NAME CRON --type TYPE."),
      future && h("p", { class: "hint" }, future.events ? `${count(future.events)} future events wait, the first until ${time(future.first_at)}.` : "No future event waits."));
  }, pulse, 5000);
}
