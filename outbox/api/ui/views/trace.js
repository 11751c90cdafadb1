// Trace of an event: timeline, attempts and diagnosis.

import { get, name, session } from "../api.js";
import { h, show } from "../dom.js";
import { timeline } from "../timeline.js";
import { live } from "../live.js";
import { badge, code, definitionList, isOperator, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, duration, expiry, payloadSize, plural, time } from "../format.js";

const ATTEMPTS = ["#Attempt", "When", "Duration", "Outcome", "Response", "Relay"];

function delivery(each) {
  return h("details", { open: each.state !== "delivered" && each.attempts.length > 0, "data-key": `${each.lane}/${each.sequence}` },
    h("summary", null, badge(each.state), " ", h("b", null, each.endpoint), ` sequence ${count(each.sequence)} of lane ${each.lane}`,
      each.replay_of ? h("small", null, " replay") : null, h("small", null, ` ${plural(each.attempts.length, "attempt")}`)),
    definitionList([["X-Delivery", h("code", null, each.delivery_id)],
      ["Endpoint", h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint)],
      each.dead_letter && ["Dead letter", h("a", { href: link("dead-letter", [String(each.dead_letter.id)]) }, `${each.dead_letter.id}, ${each.dead_letter.reason}`)]]),
    table(ATTEMPTS, each.attempts.map((attempt) => row([
      String(attempt.attempt), time(attempt.started_at), duration(attempt.elapsed_ms / 1000), badge(attempt.outcome === "retry" ? "failing" : attempt.outcome === "refused" ? "rejecting" : "delivered", attempt.outcome),
      h("details", null, h("summary", null, `${attempt.status ?? ""} ${attempt.error ?? ""}`.trim() || "–"), attempt.response && code(attempt.response)),
      String(attempt.replica_id ?? "")], ATTEMPTS)), "No attempts yet."));
}

// Diagnosis lines by endpoint.  Pending deliveries of one endpoint wait for the same cause: it is
// shown for the newest event only, and `explained` collects those endpoints.
function diagnosis(trace, explained) {
  const byEndpoint = new Map();
  for (const line of trace.diagnosis) {
    const delivery = trace.deliveries.find((each) => line.startsWith(`${each.endpoint}: sequence ${each.sequence} of lane ${each.lane} `));
    const cause = delivery ? line.slice(`${delivery.endpoint}: sequence ${delivery.sequence} of lane ${delivery.lane} `.length) : line;
    const endpoint = delivery?.endpoint ?? "";
    if (delivery?.state === "pending" && explained.has(endpoint)) continue;
    byEndpoint.set(endpoint, [...(byEndpoint.get(endpoint) ?? []), cause]);
  }
  trace.deliveries.filter((each) => each.state === "pending").forEach((each) => explained.add(each.endpoint));
  if (!byEndpoint.size) return null;
  return h("ul", { class: "diagnosis" }, [...byEndpoint].map(([endpoint, lines]) => h("li", null,
    endpoint && [h("a", { href: link("endpoint", [endpoint]) }, endpoint), ": "], lines.join("; "))));
}

function body(trace, explained) {
  const { event } = trace;
  const left = trace.deliveries_total - trace.deliveries.length;
  return [
    diagnosis(trace, explained),
    trace.deliveries.length ? timeline(trace, session.now()) : null,
    definitionList([["Published", time(event.published_at)],
      trace.sequenced && ["Sequenced", `${duration((Date.parse(trace.sequenced.at) - Date.parse(event.published_at)) / 1000)} after publish${trace.sequenced.batch === null ? "" : `, in batch ${count(trace.sequenced.batch)}`}`],
      ["Key", event.key && h("a", { href: link("events", [], { key: event.key }) }, event.key)], ["Tenant", event.tenant],
      ["Payload", event.erased_at ? `erased ${time(event.erased_at)}` : payloadSize(event)],
      event.expires_at && ["Expires", expiry(event.expires_at)]]),
    trace.deliveries.map(delivery),
    left > 0 ? h("p", { class: "hint" }, `${count(left)} more deliveries`,
      isOperator() ? ["; name an endpoint: ", h("code", null, `outbox trace ${event.event_id} --endpoint NAME`)] : null, ".") : null,
    event.payload !== null && event.payload !== undefined ? h("details", null, h("summary", null, "Payload"), code(event.payload)) : null,
  ];
}

// Of several events with one key, the newest is expanded.
function traces(events) {
  const explained = new Set();
  return events.map((trace, n) => {
    const { event } = trace;
    const title = [event.type, " ", h("code", null, event.event_id)];
    if (!n) return h("article", { "data-key": event.event_id }, h("h2", null, title), body(trace, explained));
    const states = [...new Set(trace.deliveries.map((each) => each.state))];
    return h("article", { "data-key": event.event_id }, h("details", { class: "older" },
      h("summary", null, title, " ", h("small", null, when(event.published_at)), " ", states.map((state) => [badge(state), " "])),
      body(trace, explained)));
  });
}

export function view(place, [id = ""]) {
  const title = (...more) => h("h1", null, "Trace ", h("code", null, id), ...more);
  show(place, title(), h("p", { class: "empty" }, "Loading…"));
  return live(place, async (signal) => {
    const result = await get(`/v1/trace/${name(id)}`, { payload: true }, signal);
    show(place, title(h("small", null, ` found by ${result.found_by}`)),
      traces(result.events),
      result.more ? h("p", { class: "hint" }, "There are older events: ", h("a", { href: link("events", [], { key: id }) }, "show all events with this key"), ".") : null);
  }, { every: 5000, missing: `No event matches ${id}.` });
}
