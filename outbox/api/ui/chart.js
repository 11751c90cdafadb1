// What moves, over the last ten minutes.

import { h, svg } from "./dom.js";
import { rate, tick } from "./say.js";

export const WINDOW_MS = 600000;
// Looks are two seconds apart; where more than three of them are missing, nobody knows.
export const GAP_MS = 7000;
const WHOLE_ROW = 850;
const HEIGHT = 150;
const LEFT = 44;
const RIGHT = 4;
const BOTTOM = 20;
const TOP = 8;

// As wide as it is drawn, so that its words are not stretched with its lines.
function room() {
  const main = document.getElementById("main").clientWidth - (innerWidth <= 720 ? 24 : 40);
  return Math.round((main >= WHOLE_ROW ? (main - 10) / 2 : main) - 30);
}

function nice(max) {
  if (max <= 2) return 2;
  const power = 10 ** Math.floor(Math.log10(max));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= max);
}

// Samples that follow one another closely; between two such runs there is no line.
function runs(samples) {
  const found = [];
  for (const sample of samples) {
    const at = Date.parse(sample.at);
    const run = found.at(-1);
    if (run && at - run.at(-1).at <= GAP_MS) run.push({ at, sample });
    else found.push([{ at, sample }]);
  }
  return found;
}

// The times of which nothing is known.
function gaps(found, from, now) {
  const edges = [from, ...found.flatMap((run) => [run[0].at, run.at(-1).at]), now];
  const pairs = edges.flatMap((at, n) => (n % 2 ? [] : [[at, edges[n + 1]]]));
  return pairs.filter(([begin, end]) => end - begin > GAP_MS);
}

// Lines over time.  `series` is a list of {name, kind, of, area}, where `of` takes a sample's
// number; the right edge is `now`, by the server's clock, in ms.
export function chart(title, samples, series, { now, say = rate }) {
  const wide = room();
  const shown = samples.filter((each) => Date.parse(each.at) >= now - WINDOW_MS);
  const found = runs(shown);
  const max = nice(Math.max(0, ...shown.flatMap((s) => series.map((each) => each.of(s)))));
  const x = (at) => LEFT + (wide - LEFT - RIGHT) * (1 - (now - at) / WINDOW_MS);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max);
  const grid = [0, max / 2, max].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value)),
  ]);
  const ticks = [[1, "start", "10 min ago"], [0.5, "middle", "5 min ago"], [0, "end", "now"]].map(([share, anchor, text]) => svg("text", {
    class: "tick", x: x(now - share * WINDOW_MS), y: HEIGHT - 4, "text-anchor": anchor }, text));
  const unknown = gaps(found, now - WINDOW_MS, now).map(([begin, end]) => svg("g", { class: "gap" },
    svg("rect", { x: x(begin), y: TOP, width: x(end) - x(begin), height: HEIGHT - TOP - BOTTOM }, svg("title", null, "no data: nobody was looking")),
    x(end) - x(begin) > 60 && svg("text", { class: "tick", x: (x(begin) + x(end)) / 2, y: (HEIGHT - BOTTOM) / 4 + TOP, "text-anchor": "middle" }, "no data")));
  const lines = series.map((each) => svg("g", { class: `line ${each.kind}` }, found.map((run) => {
    const points = run.map(({ at, sample }) => `${x(at).toFixed(1)},${y(each.of(sample)).toFixed(1)}`);
    if (points.length === 1) return svg("circle", { cx: x(run[0].at), cy: y(each.of(run[0].sample)), r: 2 });
    const ground = y(0).toFixed(1);
    return [
      each.area && svg("polygon", { points: `${x(run[0].at).toFixed(1)},${ground} ${points.join(" ")} ${x(run.at(-1).at).toFixed(1)},${ground}` }),
      svg("polyline", { points: points.join(" ") }),
    ];
  })));
  const last = found.at(-1)?.at(-1);
  const newest = last && now - last.at <= GAP_MS ? last.sample : null;
  const told = newest ? series.map((each) => `${each.name} ${say(each.of(newest))}`).join(", ") : "nothing yet";
  return h("figure", { class: "chart" },
    h("figcaption", null, title, h("span", { class: "legend" }, series.map((each) => h("span", { class: each.kind },
      each.name, " ", h("b", null, newest ? say(each.of(newest)) : "–"))))),
    svg("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${told}`, preserveAspectRatio: "none" },
      unknown, grid, ticks, lines));
}
