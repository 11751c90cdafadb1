// Line charts of the last ten minutes.

import { h, svg } from "./dom.js";
import { axisLabel, rate } from "./format.js";

export const WINDOW_MS = 600000;
// Samples are two seconds apart.  A distance of more than three samples is shown as a gap.
export const GAP_MS = 7000;
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

// Split samples into runs without gaps; no line connects two runs.
function splitRuns(samples) {
  const runs = [];
  for (const sample of samples) {
    const at = Date.parse(sample.at);
    const run = runs.at(-1);
    if (run && at - run.at(-1).at <= GAP_MS) run.push({ at, sample });
    else runs.push([{ at, sample }]);
  }
  return runs;
}

// Intervals without samples.
function findGaps(runs, from, now) {
  const edges = [from, ...runs.flatMap((run) => [run[0].at, run.at(-1).at]), now];
  const pairs = edges.flatMap((at, n) => (n % 2 ? [] : [[at, edges[n + 1]]]));
  return pairs.filter(([begin, end]) => end - begin > GAP_MS);
}

// Draw a line chart.  `series` is a list of {name, kind, value, area}, where `value` maps a sample
// to a number; `now` is the right edge, in ms by the server's clock.
export function chart(title, samples, series, { now, format = rate }) {
  const width = widthInPixels();
  const shown = samples.filter((each) => Date.parse(each.at) >= now - WINDOW_MS);
  const runs = splitRuns(shown);
  const max = axisMax(Math.max(0, ...shown.flatMap((s) => series.map((each) => each.value(s)))));
  const x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / WINDOW_MS);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max);
  const grid = [0, max / 2, max].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, axisLabel(value)),
  ]);
  const ticks = [[1, "start", "10 min ago"], [0.5, "middle", "5 min ago"], [0, "end", "now"]].map(([share, anchor, text]) => svg("text", {
    class: "tick", x: x(now - share * WINDOW_MS), y: HEIGHT - 4, "text-anchor": anchor }, text));
  const gaps = findGaps(runs, now - WINDOW_MS, now).map(([begin, end]) => svg("g", { class: "gap" },
    svg("rect", { x: x(begin), y: TOP, width: x(end) - x(begin), height: HEIGHT - TOP - BOTTOM }, svg("title", null, "No data: no open page was reading samples")),
    x(end) - x(begin) > 60 && svg("text", { class: "tick", x: (x(begin) + x(end)) / 2, y: (HEIGHT - BOTTOM) / 4 + TOP, "text-anchor": "middle" }, "no data")));
  const lines = series.map((each) => svg("g", { class: `line ${each.kind}` }, runs.map((run) => {
    const points = run.map(({ at, sample }) => `${x(at).toFixed(1)},${y(each.value(sample)).toFixed(1)}`);
    if (points.length === 1) return svg("circle", { cx: x(run[0].at), cy: y(each.value(run[0].sample)), r: 2 });
    const ground = y(0).toFixed(1);
    return [
      each.area && svg("polygon", { points: `${x(run[0].at).toFixed(1)},${ground} ${points.join(" ")} ${x(run.at(-1).at).toFixed(1)},${ground}` }),
      svg("polyline", { points: points.join(" ") }),
    ];
  })));
  const last = runs.at(-1)?.at(-1);
  const newest = last && now - last.at <= GAP_MS ? last.sample : null;
  const summary = newest ? series.map((each) => `${each.name} ${format(each.value(newest))}`).join(", ") : "no data yet";
  return h("figure", { class: "chart" },
    h("figcaption", null, title, h("span", { class: "legend" }, series.map((each) => h("span", { class: each.kind },
      each.name, " ", h("b", null, newest ? format(each.value(newest)) : "–"))))),
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${summary}`, preserveAspectRatio: "none" },
      gaps, grid, ticks, lines));
}
