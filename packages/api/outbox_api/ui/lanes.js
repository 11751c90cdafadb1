// Bar chart of an endpoint's lanes: the height shows pending deliveries on a logarithmic scale.

import { svg } from "./dom.js";
import { count, duration, plural } from "./format.js";

const HEIGHT = 20;
const HEIGHT_MIN = 3;

const stateOf = (lane) => (lane.blocked ? "blocked" : lane.failing ? "failing" : lane.pending ? "pending" : "idle");

// The most pending deliveries of any lane: the common scale of several charts.
export const maxPending = (endpoints) => Math.max(1, ...endpoints.flatMap((each) => each.lanes.map((lane) => lane.pending)));

// Draw the lanes `shown` of `all`; a bar of full height has `max` pending deliveries.
export function lanes(name, shown, { all = shown.length, max = maxPending([{ lanes: shown }]), oldest = null } = {}) {
  const busy = shown.filter((lane) => lane.pending);
  const troubled = shown.filter((lane) => lane.failing || lane.blocked).length;
  const age = oldest === null ? "" : `, oldest ${duration(oldest)}`;
  const bars = shown.map((lane, n) => {
    // Logarithmic: a lane with a thousand pending deliveries does not hide one with ten.
    const height = lane.pending ? HEIGHT_MIN + (HEIGHT - HEIGHT_MIN) * Math.log1p(lane.pending) / Math.log1p(max) : lane.blocked ? HEIGHT : 2;
    const state = stateOf(lane);
    const pending = lane.pending ? `${count(lane.pending)} pending` : "nothing pending";
    const since = lane.pending && busy.length === 1 ? age : "";
    return svg("rect", { class: state, x: n * 7, y: HEIGHT - height, width: 5, height, rx: 1 },
      svg("title", null, `lane ${n}: ${pending}${since}${lane.failing || lane.blocked ? `, ${state}` : ""}`));
  });
  const total = busy.reduce((sum, lane) => sum + lane.pending, 0);
  const summary = `${name}: ${plural(all, "lane")}, ${busy.length} with pending deliveries`
    + `${total ? ` (${count(total)}${age})` : ""}${troubled ? `; ${troubled} failing or blocked` : ""}`;
  return svg("svg", {
    class: "lanes", viewBox: `0 0 ${Math.max(shown.length * 7 - 2, 5)} ${HEIGHT}`, width: Math.max(shown.length, 1) * 18,
    height: HEIGHT, role: "img", "aria-label": summary, preserveAspectRatio: "none",
  }, svg("title", null, summary), bars);
}
