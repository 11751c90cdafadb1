// The life of an event, and why it is where it is.

import { get, name, session } from "../api.js";
import { h, show } from "../dom.js";
import { timeLine } from "../life.js";
import { live } from "../live.js";
import { badge, code, facts, operator, row, table, when } from "../parts.js";
import { link } from "../places.js";
import { bytes, count, duration, end, plural, time } from "../say.js";

const ATTEMPTS = ["#Attempt", "When", "Took", "Outcome", "Answer", "Replica"];

function delivery(each) {
  return h("details", { open: each.fate !== "delivered" && each.attempts.length > 0, "data-key": `${each.lane}/${each.sequence}` },
    h("summary", null, badge(each.fate), " ", h("b", null, each.endpoint), ` number ${count(each.sequence)} of lane ${each.lane}`,
      each.replay_of ? h("small", null, " sent again") : null, h("small", null, ` ${plural(each.attempts.length, "attempt")}`)),
    facts([["X-Delivery", h("code", null, each.delivery_id)],
      ["Endpoint", h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint)],
      each.letter && ["Dead letter", h("a", { href: link("letter", [String(each.letter.id)]) }, `${each.letter.id}, ${each.letter.reason}`)]]),
    table(ATTEMPTS, each.attempts.map((attempt) => row([
      String(attempt.attempt), time(attempt.started_at), duration(attempt.elapsed_ms / 1000), badge(attempt.outcome === "retry" ? "failing" : attempt.outcome === "refused" ? "refusing" : "delivered", attempt.outcome),
      h("details", null, h("summary", null, `${attempt.status ?? ""} ${attempt.error ?? ""}`.trim() || "–"), attempt.answer && code(attempt.answer)),
      String(attempt.replica_id ?? "")], ATTEMPTS)), "Not tried yet."));
}

// What the API says is wrong, by endpoint.  What an endpoint owes waits for the same, whichever
// event it is of: that is said of the newest, and `said` has the endpoints where it was.
function diagnosis(told, said) {
  const found = new Map();
  for (const line of told.diagnosis) {
    const of = told.deliveries.find((each) => line.startsWith(`${each.endpoint}: number ${each.sequence} of lane ${each.lane} `));
    const why = of ? line.slice(`${of.endpoint}: number ${of.sequence} of lane ${of.lane} `.length) : line;
    const who = of?.endpoint ?? "";
    if (of?.fate === "owed" && said.has(who)) continue;
    found.set(who, [...(found.get(who) ?? []), why]);
  }
  told.deliveries.filter((each) => each.fate === "owed").forEach((each) => said.add(each.endpoint));
  if (!found.size) return null;
  return h("ul", { class: "diagnosis" }, [...found].map(([who, lines]) => h("li", null,
    who && [h("a", { href: link("endpoint", [who]) }, who), ": "], lines.join("; "))));
}

function body(told, said) {
  const { event } = told;
  const left = told.deliveries_total - told.deliveries.length;
  return [
    diagnosis(told, said),
    told.deliveries.length ? timeLine(told, session.now()) : null,
    facts([["Published", time(event.published_at)],
      told.sequenced && ["Sequenced", `${duration((Date.parse(told.sequenced.at) - Date.parse(event.published_at)) / 1000)} later${told.sequenced.batch === null ? "" : `, in batch ${count(told.sequenced.batch)}`}`],
      ["Key", event.key && h("a", { href: link("events", [], { key: event.key }) }, event.key)], ["Tenant", event.tenant],
      ["Payload", event.erased_at ? `erased ${time(event.erased_at)}` : bytes(event.payload_bytes)],
      event.expires_at && ["Expires", end(event.expires_at)]]),
    told.deliveries.map(delivery),
    left > 0 ? h("p", { class: "hint" }, `${count(left)} more deliveries`,
      operator() ? ["; name an endpoint: ", h("code", null, `outbox trace ${event.event_id} --endpoint NAME`)] : null, ".") : null,
    event.payload !== null && event.payload !== undefined ? h("details", null, h("summary", null, "Payload"), code(event.payload)) : null,
  ];
}

// Of several with the same key the newest is open: what is wrong with it is wrong with all.
function stories(events) {
  const said = new Set();
  return events.map((told, n) => {
    const { event } = told;
    const title = [event.type, " ", h("code", null, event.event_id)];
    if (!n) return h("article", { "data-key": event.event_id }, h("h2", null, title), body(told, said));
    const fates = [...new Set(told.deliveries.map((each) => each.fate))];
    return h("article", { "data-key": event.event_id }, h("details", { class: "older" },
      h("summary", null, title, " ", h("small", null, when(event.published_at)), " ", fates.map((fate) => [badge(fate), " "])),
      body(told, said)));
  });
}

export function view(place, [wanted = ""]) {
  const title = (...more) => h("h1", null, "What happened to ", h("code", null, wanted), ...more);
  show(place, title(), h("p", { class: "empty" }, "Looking…"));
  return live(place, async (signal) => {
    const told = await get(`/v1/trace/${name(wanted)}`, { payload: true }, signal);
    show(place, title(h("small", null, ` found by its ${told.found_by}`)),
      stories(told.events),
      told.more ? h("p", { class: "hint" }, "There are older events; ", h("a", { href: link("events", [], { key: wanted }) }, "all with this key"), ".") : null);
  }, { every: 5000, missing: `Nothing is known of ${wanted}.` });
}
