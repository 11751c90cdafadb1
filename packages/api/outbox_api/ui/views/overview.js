// Overview: what needs attention, rates, pending deliveries, lanes, and endpoints by state.

import { get, session } from "../api.js";
import { attention } from "../attention.js";
import { WINDOW_MS, chart, currentSample } from "../chart.js";
import { h, show } from "../dom.js";
import { rangeName, rangedHistory } from "../history.js";
import { lanes, maxPending } from "../lanes.js";
import { live, occasionally } from "../live.js";
import { condition, badgeTone } from "../components.js";
import { link } from "../router.js";
import { count, duration, plural, rate } from "../format.js";

const DEAD_MAX = 1000;
// The status is exact, so it costs more than the rates; the checks of the doctor cost most.
const STATUS_EVERY_MS = 10000;
const CHECKS_EVERY_MS = 600000;

const tile = (label, value, { tone = "", href, hint } = {}) => h(href ? "a" : "div", { class: `tile ${tone}`, href, title: hint },
  h("span", { class: "label" }, label), h("strong", null, value));

// Endpoints by state, most severe first.
const ORDER = { bad: 0, off: 1, fair: 2, good: 3 };

function conditions(states) {
  const found = Object.entries(states).filter(([, n]) => n).sort(([a], [b]) => ORDER[badgeTone(a)] - ORDER[badgeTone(b)]);
  return found.length ? h("p", { class: "conditions" }, h("a", { href: link("endpoints") }, "Endpoints"),
    found.map(([state, n]) => h("a", { class: `badge ${badgeTone(state)}`, href: link("endpoints", [], { condition: state }) }, `${count(n)} ${state}`))) : null;
}

const row = (max) => (each) => h("li", { "data-key": each.name },
  h("a", { class: "name", href: link("endpoint", [each.name]), title: each.name }, each.name),
  condition(each, each.lanes_total),
  h("div", { class: "strip" }, lanes(each.name, each.lanes, { all: each.lanes_total, max, oldest: each.oldest_s }),
    each.lanes_total > each.lanes.length && h("small", null, `+${count(each.lanes_total - each.lanes.length)}`)),
  h("span", { class: "pending" }, each.pending ? `${count(each.pending)} pending` : "nothing pending"),
  h("span", { class: "oldest" }, each.oldest_s === null ? "" : `oldest ${duration(each.oldest_s)}`));

const none = () => h("p", { class: "empty" }, "No endpoints yet. ",
  session.may("operate") && h("a", { href: link("new-endpoint") }, "Create an endpoint"));

// A part that may be empty keeps its place, so that those behind it keep the focus.
const part = (child) => h("div", null, child);

// Healthy endpoints without pending deliveries are collapsed, unless they are few and no others are shown.
const QUIET_OPEN_MAX = 5;
const isBusy = (each) => each.pending > 0 || badgeTone(each.condition) !== "good";

// Kept when the view is left.  After a failure, the overview shows what the status knows.
let findings = [];
const readChecks = occasionally(CHECKS_EVERY_MS, async () => {
  findings = await get("/v1/doctor").then((report) => report.findings, () => findings);
});

export function view(place) {
  let samples = [];
  const system = session.tenant === null;
  let needs = null;
  let trouble = null;
  let draw;
  const history = rangedHistory("/v1/history", () => draw());
  show(place, h("h1", null, "Overview"), h("p", { class: "empty" }, "Loading…"));

  const readStatus = occasionally(STATUS_EVERY_MS, async (signal) => {
    needs = await get(system ? "/v1/status" : "/v1/endpoint-statuses", { limit: 30 }, signal);
    draw?.();
  }, { onAction: true });
  async function details(signal, acted) {
    await readStatus(signal, acted);
    await history.read(signal);
    if (!system) return;
    const before = findings;
    // The checks take seconds, for which the rates do not wait.
    readChecks().then(() => { if (findings !== before) draw(); });
  }

  return live(place, async (signal) => {
    const since = samples.length ? samples.at(-1).at : undefined;
    // What needs attention is above all else, so nothing is drawn before it is known.
    const [status] = await Promise.all([get("/v1/live", { endpoints: 30, since }, signal), needs === null && readStatus(signal)]);
    const { totals } = status;
    // What newly fails needs attention now, and not ten seconds later.
    const key = JSON.stringify([totals.states, totals.failing_lanes > 0, totals.blocked_lanes > 0, totals.dead_letters > 0]);
    if (trouble !== null && trouble !== key) await readStatus(signal, true);
    trouble = key;
    const now = Date.parse(totals.at);
    const isShown = ({ at }) => Date.parse(at) >= now - WINDOW_MS && Date.parse(at) <= now;
    samples = samples.concat(status.samples).filter(isShown);
    const completed = currentSample(samples, now)?.completed ?? null;
    const oldest = Math.max(...status.endpoints.map((each) => each.oldest_s ?? 0), 0);
    const all = Object.values(totals.states).reduce((sum, n) => sum + n, 0);
    const dead = totals.dead_letters > DEAD_MAX ? `${count(DEAD_MAX)}+` : count(totals.dead_letters);
    const busy = status.endpoints.filter(isBusy);
    const quiet = status.endpoints.filter((each) => !isBusy(each));
    draw = () => {
      const past = history.value();
      show(place,
        h("h1", null, "Overview"),
        part(needs && attention(needs, system ? findings : [])),
        h("div", { class: "tiles" },
          system
            ? tile("Deliveries completed", completed === null ? "–" : `${rate(completed)}/s`, { hint: "In the last ten seconds; unknown until a relay has led for 20 seconds" })
            : tile(`Delivered in ${rangeName(past?.hours ?? 24)}`, past ? count(past.successes) : "–"),
          tile("Pending", count(totals.pending), { tone: totals.pending > 1000 ? "fair" : "" }),
          tile("Oldest", oldest ? duration(oldest) : "–", { tone: oldest > 60 ? "fair" : "" }),
          tile("Dead letters", dead, { tone: totals.dead_letters ? "bad" : "", href: link("dead-letters") }),
          tile("Lanes failing", count(totals.failing_lanes), { tone: totals.failing_lanes ? "fair" : "" }),
          tile("Lanes blocked", count(totals.blocked_lanes), { tone: totals.blocked_lanes ? "bad" : "" })),
        part(conditions(totals.states)),
        part(history.charts(now)),
        part(system && h("div", { class: "charts" },
          chart("Per second", samples, [
            { name: "events", kind: "a", value: (s) => s.events },
            { name: "deliveries completed", kind: "b", value: (s) => s.completed, area: true },
          ], { now }),
          chart("Pending", samples, [{ name: "deliveries", kind: "c", value: (s) => s.pending, area: true }], { now, format: count }))),
        h("section", null,
          h("h2", null, "Lanes ", h("small", null, all > status.endpoints.length
            ? `of ${count(status.endpoints.length)} of ${count(all)} endpoints: those that fail, then those with the most pending deliveries`
            : plural(all, "endpoint"))),
          busy.length ? h("ul", { class: "lanelist" }, busy.map(row(maxPending(busy)))) : all ? null : none(),
          quiet.length ? h("details", { open: !busy.length && quiet.length <= QUIET_OPEN_MAX }, h("summary", null, `${plural(quiet.length, "healthy endpoint")} without pending deliveries`),
            h("ul", { class: "lanelist" }, quiet.map(row(1)))) : null,
          busy.length ? h("p", { class: "hint" }, "One bar per lane; the height shows pending deliveries (logarithmic). ",
            h("span", { class: "key idle" }, "idle"), h("span", { class: "key pending" }, "pending"),
            h("span", { class: "key failing" }, "failing"), h("span", { class: "key blocked" }, "blocked")) : null));
    };
    draw();
  }, { details });
}
