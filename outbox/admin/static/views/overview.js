// What moves now: rates, what is owed, the lanes, and what needs somebody.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { chart, lanes } from "../draw.js";
import { live } from "../live.js";
import { link, pulse } from "../main.js";
import { badge, stateOf } from "../parts.js";
import { count, duration, plural, rate } from "../say.js";

const KEPT = 300;
const DEAD_MAX = 1000;

const tile = (label, value, { tone = "", href, hint } = {}) => h(href ? "a" : "div", { class: `tile ${tone}`, href, title: hint },
  h("span", { class: "label" }, label), h("strong", null, value));

function worries(totals) {
  const bad = ["failing", "refusing", "disabled", "disabling", "paused"];
  return bad.filter((state) => totals.states[state]).map((state) => [state, totals.states[state]]);
}

function row(each) {
  const state = stateOf(each);
  return h("li", { "data-key": each.name },
    h("a", { class: "name", href: link("endpoint", [each.name]) }, each.name),
    badge(state),
    h("div", { class: "strip" }, lanes(each.name, each.lanes, each.lanes_total),
      each.lanes_total > each.lanes.length && h("small", null, `+${count(each.lanes_total - each.lanes.length)}`)),
    h("span", { class: "owed" }, each.owed ? `${count(each.owed)} owed` : "nothing owed"),
    h("span", { class: "oldest" }, each.oldest_s === null ? "" : `oldest ${duration(each.oldest_s)}`));
}

export function view(place) {
  let samples = [];
  const system = session.tenant === null;
  show(place, h("h1", null, "Overview"), h("p", { class: "empty" }, "Looking…"));

  return live(async (signal) => {
    const since = samples.length ? samples.at(-1).at : undefined;
    const told = await get("/v1/live", { endpoints: 30, since }, signal);
    samples = samples.concat(told.samples).slice(-KEPT);
    const { totals } = told;
    const newest = samples.at(-1);
    const oldest = Math.max(...told.endpoints.map((each) => each.oldest_s ?? 0), 0);
    const endpointsTotal = Object.values(totals.states).reduce((sum, n) => sum + n, 0);
    const dead = totals.dead_letters > DEAD_MAX ? `${count(DEAD_MAX)}+` : count(totals.dead_letters);
    show(place,
      h("h1", null, "Overview"),
      h("div", { class: "tiles" },
        tile("Delivered or given up", newest ? `${rate(newest.ended)}/s` : "–"),
        tile("Owed", count(totals.owed), { tone: totals.owed > 1000 ? "fair" : "" }),
        tile("Oldest", oldest ? duration(oldest) : "–", { tone: oldest > 60 ? "fair" : "" }),
        tile("Dead letters", dead, { tone: totals.dead_letters ? "bad" : "", href: link("dead") }),
        tile("Lanes that fail", count(totals.failing_lanes), { tone: totals.failing_lanes ? "fair" : "" }),
        tile("Lanes that are blocked", count(totals.blocked_lanes), { tone: totals.blocked_lanes ? "bad" : "" }),
        worries(totals).map(([state, n]) => tile(`Endpoints ${state}`, count(n), {
          tone: state === "failing" || state === "refusing" ? "bad" : "off", href: link("endpoints") }))),
      h("div", { class: "charts" },
        chart("Per second", samples, [
          ...(system ? [{ name: "events", kind: "a", of: (s) => s.events }] : [{ name: "deliveries made", kind: "a", of: (s) => s.numbered }]),
          { name: "deliveries ended", kind: "b", of: (s) => s.ended, area: true },
        ]),
        chart("Owed", samples, [{ name: "deliveries", kind: "c", of: (s) => s.owed, area: true }], count)),
      h("section", null,
        h("h2", null, "Lanes ", h("small", null, endpointsTotal > told.endpoints.length
          ? `of the ${told.endpoints.length} endpoints that are owed most, of ${count(endpointsTotal)}`
          : plural(endpointsTotal, "endpoint"))),
        told.endpoints.length
          ? h("ul", { class: "lanelist" }, told.endpoints.map(row))
          : h("p", { class: "empty" }, "There is no endpoint yet: ", h("code", null, "outbox endpoint add NAME URL"), "."),
        h("p", { class: "hint" }, "Each bar is a lane, higher the more it owes. ",
          h("span", { class: "key idle" }, "owes nothing"), h("span", { class: "key owing" }, "owes"),
          h("span", { class: "key failing" }, "its head fails"), h("span", { class: "key blocked" }, "blocked"))));
  }, pulse);
}
