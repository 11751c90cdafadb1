// What moves now: rates, what is owed, the lanes, and what needs somebody.

import { get, session } from "../api.js";
import { GAP_MS, WINDOW_MS, chart } from "../chart.js";
import { h, show } from "../dom.js";
import { highest, lanes } from "../lanes.js";
import { live } from "../live.js";
import { badge, operator, toneOf } from "../parts.js";
import { link } from "../places.js";
import { count, duration, plural, rate } from "../say.js";

const DEAD_MAX = 1000;

const tile = (label, value, { tone = "", href, hint } = {}) => h(href ? "a" : "div", { class: `tile ${tone}`, href, title: hint },
  h("span", { class: "label" }, label), h("strong", null, value));

// How the endpoints are, what needs somebody first.
const ORDER = { bad: 0, off: 1, fair: 2, good: 3 };

function conditions(states) {
  const found = Object.entries(states).filter(([, n]) => n).sort(([a], [b]) => ORDER[toneOf(a)] - ORDER[toneOf(b)]);
  return found.length ? h("p", { class: "conditions" }, h("a", { href: link("endpoints") }, "Endpoints"),
    found.map(([state, n]) => h("span", { class: `badge ${toneOf(state)}` }, `${count(n)} ${state}`))) : null;
}

const row = (top) => (each) => h("li", { "data-key": each.name },
  h("a", { class: "name", href: link("endpoint", [each.name]), title: each.name }, each.name),
  badge(each.condition),
  h("div", { class: "strip" }, lanes(each.name, each.lanes, { all: each.lanes_total, top, oldest: each.oldest_s }),
    each.lanes_total > each.lanes.length && h("small", null, `+${count(each.lanes_total - each.lanes.length)}`)),
  h("span", { class: "owed" }, each.owed ? `${count(each.owed)} owed` : "nothing owed"),
  h("span", { class: "oldest" }, each.oldest_s === null ? "" : `oldest ${duration(each.oldest_s)}`));

const none = () => h("p", { class: "empty" }, "There is no endpoint yet",
  operator() ? [": ", h("code", null, "outbox endpoint add NAME URL")] : null, ".");

// A rate over a time in which nobody looked says nothing of a moment in it.
const momentary = (sample) => sample.seconds * 1000 <= GAP_MS;

export function view(place) {
  let samples = [];
  const system = session.tenant === null;
  show(place, h("h1", null, "Overview"), h("p", { class: "empty" }, "Looking…"));

  return live(place, async (signal) => {
    const since = samples.length ? samples.at(-1).at : undefined;
    const told = await get("/v1/live", { endpoints: 30, since }, signal);
    const { totals } = told;
    const now = Date.parse(totals.at);
    samples = samples.concat(told.samples).filter((each) => Date.parse(each.at) >= now - WINDOW_MS);
    const rates = samples.filter(momentary);
    const last = rates.at(-1);
    const newest = last && now - Date.parse(last.at) <= GAP_MS ? last : null;
    const oldest = Math.max(...told.endpoints.map((each) => each.oldest_s ?? 0), 0);
    const all = Object.values(totals.states).reduce((sum, n) => sum + n, 0);
    const dead = totals.dead_letters > DEAD_MAX ? `${count(DEAD_MAX)}+` : count(totals.dead_letters);
    show(place,
      h("h1", null, "Overview"),
      h("div", { class: "tiles" },
        tile("Delivered or given up", newest ? `${rate(newest.ended)}/s` : "–", { hint: newest ? "" : "A rate needs two looks" }),
        tile("Owed", count(totals.owed), { tone: totals.owed > 1000 ? "fair" : "" }),
        tile("Oldest", oldest ? duration(oldest) : "–", { tone: oldest > 60 ? "fair" : "" }),
        tile("Dead letters", dead, { tone: totals.dead_letters ? "bad" : "", href: link("dead") }),
        tile("Lanes failing", count(totals.failing_lanes), { tone: totals.failing_lanes ? "fair" : "" }),
        tile("Lanes blocked", count(totals.blocked_lanes), { tone: totals.blocked_lanes ? "bad" : "" })),
      conditions(totals.states),
      h("div", { class: "charts" },
        chart("Per second", rates, [
          ...(system ? [{ name: "events", kind: "a", of: (s) => s.events }] : [{ name: "deliveries made", kind: "a", of: (s) => s.numbered }]),
          { name: "deliveries ended", kind: "b", of: (s) => s.ended, area: true },
        ], { now }),
        chart("Owed", samples, [{ name: "deliveries", kind: "c", of: (s) => s.owed, area: true }], { now, say: count })),
      h("section", null,
        h("h2", null, "Lanes ", h("small", null, all > told.endpoints.length
          ? `of the ${told.endpoints.length} endpoints that are owed most, of ${count(all)}`
          : plural(all, "endpoint"))),
        told.endpoints.length ? h("ul", { class: "lanelist" }, told.endpoints.map(row(highest(told.endpoints)))) : none(),
        told.endpoints.length ? h("p", { class: "hint" }, "Each bar is a lane, higher the more it owes. ",
          h("span", { class: "key idle" }, "owes nothing"), h("span", { class: "key owing" }, "owes"),
          h("span", { class: "key failing" }, "its head fails"), h("span", { class: "key blocked" }, "blocked")) : null));
  });
}
