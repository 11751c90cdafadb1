// Delivery history of the last 24 hours: charts of successes, failures and latencies, and sparklines.

import { axisMax, widthInPixels } from "./chart.js";
import { h, svg } from "./dom.js";
import { axisLabel, count, duration, time } from "./format.js";
import { occasionally } from "./live.js";

const DAY_MS = 86400000;
const HOUR_MS = 3600000;
// Intervals are five minutes long.
const EVERY_MS = 60000;
const HEIGHT = 130;
const LEFT = 58;
const RIGHT = 4;
const BOTTOM = 20;
const TOP = 8;
const SPARK = { width: 96, height: 22 };

// Reads histories, which take longer than the state: for `details` of a live view.
export const readHistory = (read) => occasionally(EVERY_MS, read);

export const sum = (items, field) => items.reduce((total, each) => total + each[field], 0);

export function percent(successes, failures) {
  const share = (100 * successes) / (successes + failures);
  // Nothing but 100 is shown as 100.
  return `${failures ? Math.min(share, 99.99).toFixed(share < 99 ? 1 : 2) : 100} %`;
}

export const milliseconds = (ms) => (ms === null ? "–" : duration(ms / 1000));

function frame(title, legend, label, max, format, now, shapes) {
  const width = widthInPixels();
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max);
  const x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / DAY_MS);
  const grid = [0, max / 2, max].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
  const ticks = [[1, "start", "24 h ago"], [0.5, "middle", "12 h ago"], [0, "end", "now"]].map(([share, anchor, text]) => svg("text", {
    class: "tick", x: x(now - share * DAY_MS), y: HEIGHT - 4, "text-anchor": anchor }, text));
  return h("figure", { class: "chart day" },
    h("figcaption", null, title, h("span", { class: "legend" }, legend.map(([kind, name, value]) => h("span", { class: kind }, name, " ", h("b", null, value))))),
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${label}`, preserveAspectRatio: "none" },
      grid, ticks, shapes(x, y)));
}

// Left and right edge of an interval in a chart.
function edges(x, each, history, now) {
  const begin = Date.parse(each.at);
  return [Math.max(x(begin), LEFT), x(Math.min(begin + history.interval_s * 1000, now))];
}

// The tooltip of an interval, over the chart's whole height.
function tooltip([left, right], text) {
  return svg("rect", { class: "interval", x: left.toFixed(1), y: TOP, width: Math.max(right - left, 1).toFixed(1), height: HEIGHT - TOP - BOTTOM }, svg("title", null, text));
}

// Bars of successes with the failures on top of them.
function deliveries(history, now) {
  const { items } = history;
  const [good, bad] = [sum(items, "successes"), sum(items, "failures")];
  const max = axisMax(Math.max(0, ...items.map((each) => each.successes + each.failures)));
  return frame("Last 24 hours", [["g", "delivered", count(good)], ["r", "failed requests", count(bad)]],
    `${count(good)} delivered, ${count(bad)} failed requests`, max, axisLabel, now, (x, y) => items.map((each) => {
      const [left, right] = edges(x, each, history, now);
      const width = Math.max(right - left - 0.4, 0.8).toFixed(1);
      const top = y(each.successes + each.failures);
      // A few failures among many successes are shown, too.
      const failed = each.failures ? Math.max(y(each.successes) - top, 2) : 0;
      return svg("g", { class: "bar" },
        each.successes > 0 && svg("rect", { class: "g", x: left.toFixed(1), y: (top + failed).toFixed(1), width, height: Math.max(y(0) - top - failed, 0.5).toFixed(1) }),
        failed > 0 && svg("rect", { class: "r", x: left.toFixed(1), y: top.toFixed(1), width, height: failed.toFixed(1) }),
        tooltip([left, right], `${time(each.at)}: ${count(each.successes)} delivered, ${count(each.failures)} failed requests`));
    }));
}

function latencies(history, now) {
  const known = history.items.filter((each) => each.p50_ms !== null);
  const max = axisMax(Math.max(0, ...known.map((each) => each.p99_ms)));
  const newest = known.at(-1);
  const half = history.interval_s * 500;
  const line = (kind, field) => (x, y) => svg("g", { class: `line ${kind}` }, runs(known, history.interval_s * 1000).map((run) => {
    const points = run.map((each) => [x(Math.min(Date.parse(each.at) + half, now)).toFixed(1), y(each[field]).toFixed(1)]);
    return points.length === 1 ? svg("circle", { cx: points[0][0], cy: points[0][1], r: 2 }) : svg("polyline", { points: points.join(" ") });
  }));
  const values = newest ? [milliseconds(newest.p50_ms), milliseconds(newest.p99_ms)] : ["–", "–"];
  return frame("Duration of successful requests", [["b", "median", values[0]], ["c", "99th percentile", values[1]]],
    newest ? `most recently median ${values[0]}, 99th percentile ${values[1]}` : "no request yet",
    max, (value) => (value ? milliseconds(value) : "0"), now, (x, y) => [line("b", "p50_ms")(x, y), line("c", "p99_ms")(x, y),
      known.map((each) => tooltip(edges(x, each, history, now),
        `${time(each.at)}: median ${milliseconds(each.p50_ms)}, 99th percentile ${milliseconds(each.p99_ms)}`))]);
}

// Neighbouring intervals; no line connects two runs.
function runs(items, span) {
  const found = [];
  for (const each of items) {
    const run = found.at(-1);
    if (run && Date.parse(each.at) - Date.parse(run.at(-1).at) <= span) run.push(each);
    else found.push([each]);
  }
  return found;
}

// Both charts; `now` is in ms by the server's clock.  Before the history is read, their place is kept.
export function dayCharts(history, now) {
  if (!history) return h("div", { class: "charts", "aria-busy": "true" }, h("figure", { class: "chart day" }), h("figure", { class: "chart day" }));
  if (!history.items.length) return h("p", { class: "empty" }, "No requests in the last 24 hours.");
  return h("div", { class: "charts" }, deliveries(history, now), latencies(history, now));
}

// A line of the 99th percentile by the hour; `items` are hourly.
export function latencySparkline(items, now) {
  const { width, height } = SPARK;
  const first = Math.floor(now / HOUR_MS) - 23;
  const known = items.filter((each) => each.p99_ms !== null && Date.parse(each.at) >= first * HOUR_MS);
  const worst = Math.max(0, ...known.map((each) => each.p99_ms));
  const max = Math.max(1, worst);
  const lines = runs(known, HOUR_MS).map((run) => {
    const points = run.map((each) => [(Math.floor(Date.parse(each.at) / HOUR_MS) - first) * 4 + 1.5, (height - 2 - (each.p99_ms / max) * (height - 4)).toFixed(1)]);
    return points.length === 1 ? svg("circle", { cx: points[0][0], cy: points[0][1], r: 1.5 }) : svg("polyline", { points: points.join(" ") });
  });
  return svg("svg", { class: "spark line c", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `99th percentile by the hour: at most ${milliseconds(worst)}, most recently ${milliseconds(known.at(-1)?.p99_ms ?? null)}` }, lines);
}

// One bar for each hour; `items` are hourly.
export function sparkline(items, now) {
  const { width, height } = SPARK;
  const first = Math.floor(now / HOUR_MS) - 23;
  const max = Math.max(1, ...items.map((each) => each.successes + each.failures));
  const [good, bad] = [sum(items, "successes"), sum(items, "failures")];
  const bars = items.map((each) => {
    const n = Math.floor(Date.parse(each.at) / HOUR_MS) - first;
    if (n < 0) return null;
    const all = Math.max(((each.successes + each.failures) / max) * height, 1);
    const failed = each.failures ? Math.max((each.failures / max) * height, 1) : 0;
    const bar = { x: n * 4, width: 3 };
    return [
      each.successes > 0 && svg("rect", { class: "g", ...bar, y: (height - all + failed).toFixed(1), height: Math.max(all - failed, 0).toFixed(1) }),
      failed > 0 && svg("rect", { class: "r", ...bar, y: (height - all).toFixed(1), height: failed.toFixed(1) }),
    ];
  });
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `Last 24 hours: ${count(good)} delivered, ${count(bad)} failed requests` }, bars);
}
