// Delivery history of up to 24 hours: charts of successes, failures and latencies, and sparklines.

import { get } from "./api.js";
import { axisMax, widthInPixels } from "./chart.js";
import { tryRequest } from "./dialogs.js";
import { h, svg } from "./dom.js";
import { axisLabel, count, duration, time } from "./format.js";
import { occasionally } from "./live.js";

const HOUR_MS = 3600000;
// Intervals are five minutes long.
const EVERY_MS = 60000;
const HEIGHT = 110;
const LEFT = 58;
const RIGHT = 4;
const BOTTOM = 20;
const TOP = 8;
const SPARK = { width: 96, height: 22 };

// In hours.
const RANGES = [1, 6, 24];
// The range that the visitor has chosen; null: the shortest with all that exists.
let chosen = null;

// Reads histories, which take longer than the state: for `details` of a live view.
export const readHistory = (read) => occasionally(EVERY_MS, read);

// The charts of a path of the API; `redraw` is called when they have changed.
export function rangedHistory(path, redraw) {
  let history = null;
  let reads = 0;
  // `range` goes with what was read for it.
  async function load(signal, range = chosen) {
    reads += 1;
    const own = reads;
    const found = await get(path, { hours: range ?? RANGES.at(-1) }, signal);
    if (own !== reads) return;
    chosen = range;
    history = { ...found, range };
    redraw();
  }
  const choose = (range) => tryRequest(() => load(undefined, range));
  return { read: readHistory(load), value: () => history, charts: (now) => charts(history, now, choose) };
}

function shownHours(history, now) {
  const [first] = history.items;
  return history.range ?? RANGES.find((hours) => first && Date.parse(first.at) > now - hours * HOUR_MS) ?? RANGES.at(-1);
}

export const rangeName = (hours) => (hours === 1 ? "hour" : `${hours} hours`);

const sum = (items, field) => items.reduce((total, each) => total + each[field], 0);

export function percent(successes, failures) {
  const share = (100 * successes) / (successes + failures);
  // Nothing but 100 is shown as 100.
  return `${failures ? Math.min(share, 99.99).toFixed(share < 99 ? 1 : 2) : 100} %`;
}

export const milliseconds = (ms) => (ms === null ? "–" : duration(ms / 1000));

function frame(title, legend, label, max, format, { now, hours }, shapes) {
  const width = widthInPixels();
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max);
  const x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / (hours * HOUR_MS));
  const grid = [0, max / 2, max].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
  const ticks = [[1, "start"], [0.5, "middle"], [0, "end"]].map(([share, anchor]) => svg("text", {
    class: "tick", x: x(now - share * hours * HOUR_MS), y: HEIGHT - 4, "text-anchor": anchor }, share ? `${share * hours < 1 ? "30 min" : `${share * hours} h`} ago` : "now"));
  return h("figure", { class: "chart day" },
    h("figcaption", null, title, h("span", { class: "legend" }, legend.map(([kind, name, value]) => h("span", { class: kind }, name, " ", h("b", null, value))))),
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${label}`, preserveAspectRatio: "none" },
      grid, ticks, shapes(x, y) ?? svg("text", { class: "tick", x: (LEFT + width) / 2, y: y(max / 2) - 6, "text-anchor": "middle" }, "none counted yet")));
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
function deliveries(history, { now, hours }) {
  const { items, successes: good, failures: bad } = history;
  const max = axisMax(Math.max(0, ...items.map((each) => each.successes + each.failures)));
  return frame(`Last ${rangeName(hours)}`, [["g", "delivered", count(good)], ["r", "failed requests", count(bad)]],
    `${count(good)} delivered, ${count(bad)} failed requests`, max, axisLabel, { now, hours }, (x, y) => (items.length ? items.map((each) => {
      const [left, right] = edges(x, each, history, now);
      const width = Math.max(right - left - 0.4, 0.8).toFixed(1);
      const top = y(each.successes + each.failures);
      // A few failures among many successes are shown, too.
      const failed = each.failures ? Math.max(y(each.successes) - top, 2) : 0;
      return svg("g", { class: "bar" },
        each.successes > 0 && svg("rect", { class: "g", x: left.toFixed(1), y: (top + failed).toFixed(1), width, height: Math.max(y(0) - top - failed, 0.5).toFixed(1) }),
        failed > 0 && svg("rect", { class: "r", x: left.toFixed(1), y: top.toFixed(1), width, height: failed.toFixed(1) }),
        tooltip([left, right], `${time(each.at)}: ${count(each.successes)} delivered, ${count(each.failures)} failed requests`));
    }) : null));
}

// The values beside the title are of the whole range, as in the list of endpoints.
function latencies(history, { now, hours }) {
  const known = history.items.filter((each) => each.p50_ms !== null);
  const max = axisMax(Math.max(0, ...known.map((each) => each.p99_ms)));
  const half = history.interval_s * 500;
  const line = (kind, field) => (x, y) => svg("g", { class: `line ${kind}` }, runs(known, history.interval_s * 1000).map((run) => {
    const points = run.map((each) => [x(Math.min(Date.parse(each.at) + half, now)).toFixed(1), y(each[field]).toFixed(1)]);
    return points.length === 1 ? svg("circle", { cx: points[0][0], cy: points[0][1], r: 2 }) : svg("polyline", { points: points.join(" ") });
  }));
  const values = [milliseconds(history.p50_ms), milliseconds(history.p99_ms)];
  return frame("Duration of successful requests", [["b", "median", values[0]], ["c", "99th percentile", values[1]]],
    known.length ? `median ${values[0]}, 99th percentile ${values[1]}` : "no successful request",
    max, (value) => (value ? milliseconds(value) : "0"), { now, hours }, (x, y) => (known.length ? [line("b", "p50_ms")(x, y), line("c", "p99_ms")(x, y),
      known.map((each) => tooltip(edges(x, each, history, now),
        `${time(each.at)}: median ${milliseconds(each.p50_ms)}, 99th percentile ${milliseconds(each.p99_ms)}`))] : null));
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

const ranges = (hours, choose) => h("div", { class: "ranges", role: "group", "aria-label": "Range of the charts" }, RANGES.map((each) => h("button", {
  type: "button", class: "plain", "aria-pressed": String(each === hours), disabled: !choose, onclick: () => choose(each) }, `${each} h`)));

// Both charts; `now` is in ms by the server's clock.  Before the history is read, their place is kept.
function charts(history, now, choose) {
  if (!history) return h("div", { class: "past-charts", "aria-busy": "true" }, ranges(chosen), h("div", { class: "charts" }, h("figure", { class: "chart day" }), h("figure", { class: "chart day" })));
  const hours = shownHours(history, now);
  const given = { now, hours };
  return h("div", { class: "past-charts" }, ranges(hours, choose), h("div", { class: "charts" }, deliveries(history, given), latencies(history, given)));
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
