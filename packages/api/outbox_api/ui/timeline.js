// Timeline of an event: the spans of its only delivery, or one row per delivery.

import { h, svg } from "./dom.js";
import { duration, plural, time } from "./format.js";

const TICKS_MS = [0, 10, 100, 1000, 10000, 60000, 600000, 3600000, 86400000, 604800000];
// Least distance of two ticks on a wide screen, in percent of the axis.
const TICK_GAP = 9;
const AXIS_PX = 20;
const ROW_PX = 21;
// Spans at the beginning and at the end; one row replaces those between.
const SPANS_AROUND = 7;
const FAILURES = [["retry", "failed, retried"], ["probe", "failed probe, costs no retry"], ["refused", "refused"]];
const UNFINISHED = { pending: 0, replaying: 0, dead: 1 };

const rank = (delivery) => UNFINISHED[delivery.state] ?? 2;

// Pending deliveries first, then dead ones, which wait for a person.
export const unfinishedFirst = (deliveries) => [...deliveries].sort((a, b) => rank(a) - rank(b));

const words = (state) => state.replaceAll("_", " ");

const endOf = (attempt) => Date.parse(attempt.started_at) + attempt.elapsed_ms;

// A span that begins at the publication has a time after it, any other span a duration.
const value = ({ from, to, after }) => `${after ? "after " : ""}${duration(Math.max(0, to - from) / 1000)}`;
const phrase = (span) => `${span.name}${span.after ? "" : ","} ${value(span)}`;

function sequencing(delivery, published) {
  const name = delivery.replay_of ? "replayed" : delivery.backfill === null ? "sequenced" : "backfilled";
  return { kind: "sequenced", name, from: published, to: Date.parse(delivery.sequenced_at), after: true,
    hint: "The time of publication is that of the insert, before the commit" };
}

// A probe is an attempt, too, and has its number.
function attemptSpan(each) {
  return { kind: "attempt", outcome: each.outcome, from: Date.parse(each.started_at), to: endOf(each), hint: time(each.started_at),
    name: `${each.outcome === "probe" ? "probe" : "attempt"} ${each.attempt}: ${each.status ?? each.error ?? each.outcome}` };
}

// The wait before an attempt.  A trace lists the newest attempts only.
function waitName(attempt, previous) {
  if (attempt > previous + 1) return "not listed";
  return attempt === 1 ? "waited in its lane" : "retry wait";
}

function ending(delivery, published, now) {
  const span = { kind: "end", from: published, after: true };
  const letter = delivery.dead_letter;
  if (letter) return { ...span, name: "dead-lettered", isDead: true, to: Date.parse(letter.at), hint: letter.reason };
  if (delivery.state === "pending") return { ...span, name: "unacknowledged", to: now };
  const last = delivery.attempts.findLast((each) => each.outcome === "delivered");
  return last && { ...span, name: "acknowledged", to: endOf(last) };
}

// Spans of a delivery from its publication to its acknowledgement.  The database and the relays
// have clocks of their own: a wait that would be negative is left out.
function spansOf(delivery, published, now) {
  const spans = [sequencing(delivery, published)];
  let [{ to: at }] = spans;
  let previous = 0;
  const wait = (name, to) => {
    if (to - at >= 1) spans.push({ kind: "wait", name, from: at, to });
  };
  for (const each of delivery.attempts) {
    const span = attemptSpan(each);
    wait(waitName(each.attempt, previous), span.from);
    spans.push(span);
    [at, previous] = [span.to, each.attempt];
  }
  if (delivery.state === "pending") wait(previous ? "pending" : "waits in its lane", now);
  const end = ending(delivery, published, now);
  return end ? [...spans, end] : spans;
}

function shorten(spans) {
  const middle = spans.slice(SPANS_AROUND, -SPANS_AROUND);
  if (middle.length < 2) return spans;
  const attempts = middle.filter((each) => each.kind === "attempt").length;
  const between = { kind: "wait", name: plural(attempts, "attempt"), from: middle[0].from, to: middle.at(-1).to };
  return [...spans.slice(0, SPANS_AROUND), between, ...spans.slice(-SPANS_AROUND)];
}

const describe = (spans) => shorten(spans).map(phrase).join("; ");

// Positions in percent, so that the figure has the width of its place.  Most attempts happen in
// the first seconds: the axis is logarithmic above 10 ms.
function logarithmic(from, span) {
  const scale = Math.log1p(span / 10);
  return (at) => 100 * Math.log1p(Math.max(0, at - from) / 10) / scale;
}

const percent = (n) => `${n.toFixed(2)}%`;

const stroke = (name, x, { from, to }) => svg("line",
  { class: name, x1: percent(x(from)), x2: percent(x(Math.max(from, to))), y1: "50%", y2: "50%" });

const bar = (span, x, state = "") => stroke(`${span.kind} ${state}`, x, span);

function attemptMark(span, x) {
  return svg("g", { class: `attempt ${span.outcome}` }, stroke("whole", x, span), span.outcome === "probe" && stroke("hollow", x, span),
    svg("title", null, `${phrase(span)}, ${span.outcome}, ${span.hint}`));
}

// `left` is its offset: it has too little contrast on the bar of an attempt.
const cross = (span, x, left) => svg("svg", { x: percent(x(span.to)), y: "50%" },
  svg("path", { class: "dead", d: `M${left} -4l8 8m0 -8l-8 8` }, svg("title", null, `${phrase(span)}: ${span.hint}`)));

const band = (name, { kind, label, title, total }, ...marks) => h("div", { class: `band ${kind}`, title },
  h("span", { class: "endpoint", title: label }, name), svg("svg", { class: "track" }, marks), h("span", { class: "total" }, total));

function spanRow(span, x, state) {
  return band(span.name, { kind: span.kind, label: phrase(span), title: span.hint, total: value(span) },
    span.kind === "attempt" ? attemptMark(span, x) : bar(span, x, state), span.isDead && cross(span, x, -4));
}

// One row for a whole delivery.
function deliveryRow(delivery, spans, x) {
  const [first, last] = [spans[0], spans.at(-1)];
  const name = `${delivery.endpoint}${delivery.replay_of ? ", replay" : ""}`;
  const total = last.kind === "end" ? duration(Math.max(0, last.to - last.from) / 1000) : "";
  return band(name, { kind: `delivery ${delivery.state}`, label: name, title: `${words(delivery.state)}: ${describe(spans)}`, total: delivery.state === "pending" ? `${total}…` : total },
    bar(first, x), bar({ kind: "wait", from: first.to, to: last.to }, x),
    spans.filter((each) => each.kind === "attempt").map((each) => attemptMark(each, x)), last.isDead && cross(last, x, 4));
}

// Ticks whose labels have room on a wide screen.
function ticksOf(at) {
  let end = 0;
  return TICKS_MS.filter((ms) => {
    const isKept = at(ms) >= end && at(ms) <= 100 - TICK_GAP;
    if (isKept) end = at(ms) + TICK_GAP;
    return isKept;
  });
}

// A narrow place has room for the tick next to the middle only.
function axis(at, rows) {
  const bottom = AXIS_PX + rows * ROW_PX;
  const fromMiddle = (ms) => Math.abs(at(ms) - 40);
  const ticks = ticksOf(at);
  const [middle] = ticks.slice(1).sort((a, b) => fromMiddle(a) - fromMiddle(b));
  return svg("svg", { class: "axis" }, ticks.map((ms) => {
    const x = percent(at(ms));
    return svg("g", { class: ms && ms !== middle ? "fine" : null }, svg("line", { class: "grid", x1: x, x2: x, y1: 4, y2: bottom }),
      svg("text", { class: ms ? "tick" : "tick zero", x, dx: ms ? 4 : -4, y: 14 }, ms ? `+${duration(ms / 1000)}` : "published"));
  }));
}

function caption(spans, isSingle) {
  const outcomes = new Set(spans.map((each) => each.outcome));
  const key = (name, text) => h("span", { class: `key ${name}` }, text);
  return h("figcaption", { class: "hint" }, h("span", null, "Logarithmic time axis."),
    !isSingle && [key("sequenced", "until sequenced"), outcomes.has("delivered") && key("delivered", "delivered")],
    FAILURES.filter(([name]) => outcomes.has(name)).map(([name, text]) => key(name, text)),
    spans.some((each) => each.isDead) && key("dead-lettered", "× dead-lettered"));
}

function summary(deliveries, spans, total) {
  const number = `timeline of ${plural(deliveries.length, "delivery", "deliveries")}`;
  if (deliveries.length === 1) return `${number}, to ${deliveries[0].endpoint}: ${describe(spans)}`;
  const states = Object.entries(Object.groupBy(deliveries, (each) => each.state)).map(([state, found]) => `${found.length} ${words(state)}`);
  const probes = spans.filter((each) => each.outcome === "probe").length;
  return `${number} over ${duration(total / 1000)}: ${states.join(", ")}${probes ? `; ${plural(probes, "failed probe")}` : ""}`;
}

// Draw the deliveries of a trace over a time axis; `now` is in ms.
export function timeline(trace, now) {
  const from = Date.parse(trace.event.published_at);
  const deliveries = unfinishedFirst(trace.deliveries);
  const all = deliveries.map((each) => spansOf(each, from, now));
  const spans = all.flat();
  const total = Math.max(1, ...spans.map((each) => each.to - from));
  const x = logarithmic(from, total);
  const isSingle = deliveries.length === 1;
  const rows = isSingle ? shorten(spans).map((each) => spanRow(each, x, deliveries[0].state)) : deliveries.map((each, n) => deliveryRow(each, all[n], x));
  return h("figure", { class: "timeline" },
    h("div", { class: "bands", role: "img", "aria-label": summary(deliveries, spans, total) }, axis((ms) => x(from + ms), rows.length),
      !isSingle && h("span", { class: "total" }, "total"), rows),
    caption(spans, isSingle));
}
