// Line charts of the last hour.

import { h, svg } from "./dom.js";
import { axisLabel, rate } from "./format.js";

export const WINDOW_MS = 3600000;
// The leader writes a sample every ten seconds.  When none is newer than this, the line has ended.
const CURRENT_MS = 25000;
const TWO_COLUMNS_MIN = 850;
const HEIGHT = 150;
const LEFT = 44;
const RIGHT = 4;
const BOTTOM = 20;
const TOP = 8;

// The viewBox has the width in pixels, so that text is not stretched with the lines.
export function widthInPixels() {
  const main = document.getElementById("main").clientWidth - (innerWidth <= 720 ? 24 : 40);
  return Math.round((main >= TWO_COLUMNS_MIN ? (main - 10) / 2 : main) - 30);
}

export function axisMax(max) {
  if (max <= 2) return 2;
  const power = 10 ** Math.floor(Math.log10(max));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= max);
}

// Split samples into runs; no line connects two runs.  A sample of an unknown interval begins one.
function splitRuns(samples) {
  const runs = [];
  for (const sample of samples) {
    if (sample.seconds === null || !runs.length) runs.push([]);
    runs.at(-1).push({ at: Date.parse(sample.at), sample });
  }
  return runs;
}

// The times that no sample covers; the newest interval is not over.
function findGaps(runs, from, now) {
  const covered = runs.map((run) => [run[0].at - (run[0].sample.seconds ?? 0) * 1000, run.at(-1).at]);
  if (covered.length && now - covered.at(-1)[1] <= CURRENT_MS) covered.at(-1)[1] = now;
  const edges = [from, ...covered.flat(), now];
  const pairs = edges.flatMap((at, n) => (n % 2 ? [] : [[at, edges[n + 1]]]));
  return pairs.filter(([begin, end]) => end > begin);
}

// The newest sample; null: it is too old.
export function currentSample(samples, now) {
  const last = samples.at(-1);
  return last && now - Date.parse(last.at) <= CURRENT_MS ? last : null;
}

// Draw a line chart of samples that are not older than the window.  `series` is a list of {name, kind, value, area}, where `value` maps a sample
// to a number, or to null; `now` is the right edge, in ms by the server's clock.
export function chart(title, samples, series, { now, format = rate }) {
  const width = widthInPixels();
  const runs = splitRuns(samples);
  const max = axisMax(Math.max(0, ...samples.flatMap((s) => series.map((each) => each.value(s) ?? 0))));
  const x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / WINDOW_MS);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max);
  const grid = [0, max / 2, max].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, axisLabel(value)),
  ]);
  const ticks = [[1, "start", "1 h ago"], [0.5, "middle", "30 min ago"], [0, "end", "now"]].map(([share, anchor, text]) => svg("text", {
    class: "tick", x: x(now - share * WINDOW_MS), y: HEIGHT - 4, "text-anchor": anchor }, text));
  const gaps = findGaps(runs, now - WINDOW_MS, now).map(([begin, end]) => svg("g", { class: "gap" },
    svg("rect", { x: x(begin), y: TOP, width: x(end) - x(begin), height: HEIGHT - TOP - BOTTOM }, svg("title", null, "No data: no relay led, or the clock was set")),
    x(end) - x(begin) > 60 && svg("text", { class: "tick", x: (x(begin) + x(end)) / 2, y: (HEIGHT - BOTTOM) / 4 + TOP, "text-anchor": "middle" }, "no data")));
  const ground = y(0).toFixed(1);
  const lines = series.map((each) => svg("g", { class: `line ${each.kind}` }, runs.map((run) => {
    const known = run.filter(({ sample }) => each.value(sample) !== null);
    const [xs, ys] = [known.map(({ at }) => x(at).toFixed(1)), known.map(({ sample }) => y(each.value(sample)).toFixed(1))];
    if (known.length < 2) return known.length ? svg("circle", { cx: xs[0], cy: ys[0], r: 2 }) : null;
    const points = xs.map((left, n) => `${left},${ys[n]}`).join(" ");
    return [
      each.area && svg("polygon", { points: `${xs[0]},${ground} ${points} ${xs.at(-1)},${ground}` }),
      svg("polyline", { points }),
    ];
  })));
  const current = currentSample(samples, now);
  const latest = (each) => (current && each.value(current) !== null ? format(each.value(current)) : "–");
  const summary = current ? series.map((each) => `${each.name} ${latest(each)}`).join(", ") : "no data";
  return h("figure", { class: "chart" },
    h("figcaption", null, title, h("span", { class: "legend" }, series.map((each) => h("span", { class: each.kind },
      each.name, " ", h("b", null, latest(each)))))),
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${summary}`, preserveAspectRatio: "none" },
      gaps, grid, ticks, lines));
}
