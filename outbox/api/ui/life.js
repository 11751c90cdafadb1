// The life of an event.

import { h, svg } from "./dom.js";
import { duration, time } from "./say.js";

const NARROWEST = 620;

// As wide as it is drawn, so that its words have the size of others.
function room() {
  const main = document.getElementById("main").clientWidth - (innerWidth <= 720 ? 24 : 40);
  return Math.max(NARROWEST, main - 30);
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
  const width = room();
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
    if (ms > span || at - lastX < 64) continue;
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
    svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": `time line of ${story.deliveries.length} deliveries over ${duration(span / 1000)}` },
      ticks,
      sequenced && svg("line", { class: "sequenced", x1: sequenced, x2: sequenced, y1: 18, y2: height },
        svg("title", null, `sequenced ${time(story.sequenced.at)}`)),
      rows),
    h("figcaption", { class: "hint" }, "Time grows by tens to the right. ",
      h("span", { class: "key delivered" }, "delivered"), h("span", { class: "key retry" }, "failed, tried again"),
      h("span", { class: "key refused" }, "refused"), h("span", { class: "key given" }, "× given up")));
}
