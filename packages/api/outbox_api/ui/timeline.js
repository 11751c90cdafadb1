// Timeline of an event: one row per delivery.

import { h, svg } from "./dom.js";
import { duration, time } from "./format.js";

const WIDTH_MIN = 620;

// The viewBox has the width in pixels, so that text keeps its size.
function widthInPixels() {
  const main = document.getElementById("main").clientWidth - (innerWidth <= 720 ? 24 : 40);
  return Math.max(WIDTH_MIN, main - 30);
}

// Draw the deliveries of a trace over a logarithmic time axis; `now` is in ms.
export function timeline(trace, now) {
  const from = Date.parse(trace.event.published_at);
  const marks = [from];
  for (const delivery of trace.deliveries) {
    for (const attempt of delivery.attempts) {
      marks.push(Date.parse(attempt.started_at) + attempt.elapsed_ms);
    }
    if (delivery.dead_letter) marks.push(Date.parse(delivery.dead_letter.at));
    if (delivery.state === "pending") marks.push(now);
  }
  if (trace.sequenced) marks.push(Date.parse(trace.sequenced.at));
  const span = Math.max(1, Math.max(...marks) - from);
  const width = widthInPixels();
  const left = 8;
  const right = 16;
  const row = 30;
  // Most attempts happen in the first seconds: the axis is logarithmic above 10 ms.
  const scale = Math.log1p(span / 10);
  const x = (at) => left + (width - left - right) * (Math.log1p(Math.max(0, at - from) / 10) / scale);
  const height = 34 + trace.deliveries.length * row;
  const ticks = [];
  let lastX = -100;
  for (const ms of [0, 10, 100, 1000, 10000, 60000, 600000, 3600000, 86400000, 604800000]) {
    const at = x(from + ms);
    if (ms > span || at - lastX < 64) continue;
    lastX = at;
    ticks.push(svg("line", { class: "grid", x1: at, x2: at, y1: 18, y2: height }),
      svg("text", { class: "tick", x: at + 3, y: 12 }, ms ? `+${duration(ms / 1000)}` : "published"));
  }
  const sequenced = trace.sequenced && x(Date.parse(trace.sequenced.at));
  const rows = trace.deliveries.map((delivery, n) => {
    const y = 34 + n * row + 8;
    const begin = x(Date.parse(delivery.sequenced_at));
    const attempts = delivery.attempts.map((attempt) => {
      const start = x(Date.parse(attempt.started_at));
      const end = x(Date.parse(attempt.started_at) + attempt.elapsed_ms);
      const response = attempt.status ?? attempt.error ?? "";
      return svg("g", { class: `attempt ${attempt.outcome}` },
        svg("rect", { x: start - 3, y: y - 5, width: Math.max(6, end - start + 3), height: 10, rx: 3 }),
        svg("title", null, `attempt ${attempt.attempt}: ${attempt.outcome} ${response}, `
          + `${duration(attempt.elapsed_ms / 1000)}, ${time(attempt.started_at)}`));
    });
    const ends = delivery.attempts.map((each) => Date.parse(each.started_at) + each.elapsed_ms);
    const until = x(delivery.dead_letter ? Date.parse(delivery.dead_letter.at)
      : delivery.state === "pending" ? now : Math.max(from, ...ends));
    return svg("g", { class: `delivery ${delivery.state}` },
      svg("text", { class: "endpoint", x: left, y: y - 10 }, delivery.endpoint),
      svg("line", { class: "wait", x1: begin, x2: Math.max(until, begin), y1: y, y2: y }),
      attempts,
      delivery.dead_letter && svg("path", {
        class: "dead", d: `M${until - 5} ${y - 5}l10 10m0 -10l-10 10`,
      }, svg("title", null, `dead-lettered: ${delivery.dead_letter.reason}`)));
  });
  return h("figure", { class: "timeline", tabindex: "0" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": `timeline of ${trace.deliveries.length} deliveries over ${duration(span / 1000)}` },
      ticks,
      sequenced && svg("line", { class: "sequenced", x1: sequenced, x2: sequenced, y1: 18, y2: height },
        svg("title", null, `sequenced ${time(trace.sequenced.at)}`)),
      rows),
    h("figcaption", { class: "hint" }, "Logarithmic time axis. ",
      h("span", { class: "key delivered" }, "delivered"), h("span", { class: "key retry" }, "failed, retried"),
      h("span", { class: "key probe" }, "failed probe, costs no retry"),
      h("span", { class: "key refused" }, "refused"), h("span", { class: "key dead-lettered" }, "× dead-lettered")));
}
