// The life of an event, and why it is where it is.

import { get, name, session } from "../api.js";
import { h, show } from "../dom.js";
import { timeLine } from "../draw.js";
import { live } from "../live.js";
import { link, pulse } from "../main.js";
import { badge, code, facts, row, table } from "../parts.js";
import { bytes, count, duration, plural, time } from "../say.js";

const ATTEMPTS = ["#Attempt", "When", "Took", "Outcome", "Answer", "Replica"];

function delivery(each) {
  return h("details", { open: each.fate !== "delivered", "data-key": `${each.lane}/${each.sequence}` },
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

function story(told) {
  const { event } = told;
  const total = told.deliveries_total;
  return h("article", { "data-key": event.event_id },
    h("h2", null, event.type, " ", h("code", null, event.event_id)),
    told.diagnosis.length ? h("ul", { class: "diagnosis" }, told.diagnosis.map((line) => h("li", null, line))) : null,
    told.deliveries.length ? timeLine(told, session.now()) : null,
    facts([["Published", time(event.published_at)],
      told.sequenced && ["Sequenced", `${duration((Date.parse(told.sequenced.at) - Date.parse(event.published_at)) / 1000)} later${told.sequenced.batch === null ? "" : `, in batch ${count(told.sequenced.batch)}`}`],
      ["Key", event.key && h("a", { href: link("events", [], { key: event.key }) }, event.key)], ["Tenant", event.tenant],
      ["Payload", event.erased_at ? `erased ${time(event.erased_at)}` : bytes(event.payload_bytes)],
      event.expires_at && ["Expires", time(event.expires_at)]]),
    told.deliveries.map(delivery),
    total > told.deliveries.length ? h("p", { class: "hint" }, `${count(total - told.deliveries.length)} more deliveries; name an endpoint: outbox trace ${event.event_id} --endpoint NAME`) : null,
    event.payload !== null && event.payload !== undefined ? h("details", null, h("summary", null, "Payload"), code(event.payload)) : null);
}

export function view(place, [wanted]) {
  show(place, h("h1", null, "What happened to ", h("code", null, wanted)), h("p", { class: "empty" }, "Looking…"));
  return live(async (signal) => {
    let told;
    try {
      told = await get(`/v1/trace/${name(wanted)}`, { payload: true }, signal);
    } catch (error) {
      if (error.status !== 404 && error.status !== 400 && error.status !== 422) throw error;
      show(place, h("h1", null, "What happened to ", h("code", null, wanted)), h("p", { class: "bad" }, error.message));
      return;
    }
    show(place, h("h1", null, "What happened to ", h("code", null, wanted), h("small", null, ` found by its ${told.found_by}`)),
      told.events.map(story),
      told.more ? h("p", { class: "hint" }, "There are older events; ", h("a", { href: link("events", [], { key: wanted }) }, "all with this key"), ".") : null);
  }, pulse, 5000);
}
