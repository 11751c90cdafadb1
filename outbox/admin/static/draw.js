// Pictures: what moves, the lanes, and the life of an event.

import { h, svg } from "./dom.js";
import { count, duration, rate, time } from "./say.js";

// As wide as it is drawn, so that its words are not stretched with its lines.
const width = () => (innerWidth <= 720 ? 340 : 640);
const HEIGHT = 150;
const LEFT = 44;
const BOTTOM = 20;
const TOP = 8;

function nice(max) {
  if (max <= 2) return 2;
  const power = 10 ** Math.floor(Math.log10(max));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= max);
}

// Lines over time.  `series` is a list of {name, kind, of}, where `of` takes a sample's number.
export function chart(title, samples, series, say = rate) {
  const wide = width();
  const last = samples.length ? Date.parse(samples.at(-1).at) : Date.now();
  const span = Math.max(120000, samples.length ? last - Date.parse(samples[0].at) : 0);
  const max = nice(Math.max(0, ...samples.flatMap((s) => series.map((each) => each.of(s)))));
  const x = (at) => LEFT + (wide - LEFT - 4) * (1 - (last - at) / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max);
  const grid = [0, max / 2, max].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: wide - 4, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, rate(value)),
  ]);
  const ticks = [1, 0.5, 0].map((share) => svg("text", {
    class: "tick", x: LEFT + (wide - LEFT - 4) * (1 - share), y: HEIGHT - 4,
    "text-anchor": share === 1 ? "start" : share ? "middle" : "end",
  }, share ? `${duration(span * share / 1000)} ago` : "now"));
  const lines = series.map((each) => {
    const points = samples.map((s) => `${x(Date.parse(s.at)).toFixed(1)},${y(each.of(s)).toFixed(1)}`);
    if (!points.length) return null;
    const ground = y(0).toFixed(1);
    const first = points[0].split(",")[0];
    const end = points.at(-1).split(",")[0];
    return svg("g", { class: `line ${each.kind}` },
      each.area && svg("polygon", { points: `${first},${ground} ${points.join(" ")} ${end},${ground}` }),
      svg("polyline", { points: points.join(" ") }));
  });
  const now = samples.at(-1);
  const told = now ? series.map((each) => `${each.name} ${say(each.of(now))}`).join(", ") : "nothing yet";
  return h("figure", { class: "chart" },
    h("figcaption", null, title, h("span", { class: "legend" }, series.map((each) => h("span", { class: each.kind },
      each.name, " ", h("b", null, now ? say(each.of(now)) : "–"))))),
    svg("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${told}`, preserveAspectRatio: "none" },
      grid, ticks, lines),
    samples.length ? null : h("p", { class: "empty" }, "The picture begins now: rates need two looks."));
}

// Every lane is a bar: the higher, the more it owes (by powers of two).
export function lanes(name, found, total) {
  const bars = found.map((lane, n) => {
    const height = lane.owed ? Math.min(18, 3 + Math.log2(lane.owed) * 1.6) : 2;
    const kind = lane.blocked ? "blocked" : lane.failing ? "failing" : lane.owed ? "owing" : "idle";
    const word = kind === "idle" ? "owes nothing" : `owes ${count(lane.owed)}${kind === "owing" ? "" : `, ${kind}`}`;
    return svg("rect", { class: kind, x: n * 7, y: 20 - height, width: 5, height, rx: 1 },
      svg("title", null, `lane ${n}: ${word}`));
  });
  const owing = found.filter((lane) => lane.owed).length;
  const stuck = found.filter((lane) => lane.failing || lane.blocked).length;
  const width = Math.max(found.length * 7, 7);
  return svg("svg", {
    class: "lanes", viewBox: `0 0 ${width} 20`, width, height: 20, role: "img",
    "aria-label": `${name}: ${total} lanes, ${owing} owe something, ${stuck} fail or are blocked`,
  }, bars);
}

// The life of an event: a row for each delivery, time from left to right.
export function timeLine(story, now) {
  const from = Date.parse(story.event.published_at);
  const marks = [from];
  for (const delivery of story.deliveries) {
    for (const attempt of delivery.attempts) {
      marks.push(Date.parse(attempt.started_at) + attempt.elapsed_ms);
    }
    if (delivery.letter) marks.push(Date.parse(delivery.letter.at));
    if (delivery.fate === "owed") marks.push(now);
  }
  if (story.sequenced) marks.push(Date.parse(story.sequenced.at));
  const span = Math.max(1, Math.max(...marks) - from);
  const width = 720;
  const left = 8;
  const right = 16;
  const row = 30;
  // Half of the width is for the beginning, where most of it happens.
  const scale = Math.log1p(span / 10);
  const x = (at) => left + (width - left - right) * (Math.log1p(Math.max(0, at - from) / 10) / scale);
  const height = 34 + story.deliveries.length * row;
  const ticks = [];
  let lastX = -100;
  for (const ms of [0, 10, 100, 1000, 10000, 60000, 600000, 3600000, 86400000, 604800000]) {
    const at = x(from + ms);
    if (ms > span || at - lastX < 56) continue;
    lastX = at;
    ticks.push(svg("line", { class: "grid", x1: at, x2: at, y1: 18, y2: height }),
      svg("text", { class: "tick", x: at + 3, y: 12 }, ms ? `+${duration(ms / 1000)}` : "published"));
  }
  const sequenced = story.sequenced && x(Date.parse(story.sequenced.at));
  const rows = story.deliveries.map((delivery, n) => {
    const y = 34 + n * row + 8;
    const begin = x(Date.parse(delivery.numbered_at));
    const attempts = delivery.attempts.map((attempt) => {
      const start = x(Date.parse(attempt.started_at));
      const end = x(Date.parse(attempt.started_at) + attempt.elapsed_ms);
      const said = attempt.status ?? attempt.error ?? "";
      return svg("g", { class: `attempt ${attempt.outcome}` },
        svg("rect", { x: start - 3, y: y - 5, width: Math.max(6, end - start + 3), height: 10, rx: 3 }),
        svg("title", null, `attempt ${attempt.attempt}: ${attempt.outcome} ${said}, `
          + `${duration(attempt.elapsed_ms / 1000)}, ${time(attempt.started_at)}`));
    });
    const ends = delivery.attempts.map((each) => Date.parse(each.started_at) + each.elapsed_ms);
    const until = x(delivery.letter ? Date.parse(delivery.letter.at)
      : delivery.fate === "owed" ? now : Math.max(from, ...ends));
    return svg("g", { class: `delivery ${delivery.fate}` },
      svg("text", { class: "who", x: left, y: y - 10 }, delivery.endpoint),
      svg("line", { class: "wait", x1: begin, x2: Math.max(until, begin), y1: y, y2: y }),
      attempts,
      delivery.letter && svg("path", {
        class: "dead", d: `M${until - 5} ${y - 5}l10 10m0 -10l-10 10`,
      }, svg("title", null, `given up: ${delivery.letter.reason}`)));
  });
  return h("figure", { class: "life" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `time line of ${story.deliveries.length} deliveries over ${duration(span / 1000)}` },
      ticks,
      sequenced && svg("line", { class: "sequenced", x1: sequenced, x2: sequenced, y1: 18, y2: height },
        svg("title", null, `sequenced ${time(story.sequenced.at)}`)),
      rows),
    h("figcaption", { class: "hint" }, "Time grows by tens to the right. ",
      h("span", { class: "key delivered" }, "delivered"), h("span", { class: "key retry" }, "failed, tried again"),
      h("span", { class: "key refused" }, "refused"), h("span", { class: "key given" }, "× given up")));
}
