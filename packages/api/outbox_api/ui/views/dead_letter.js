// One dead letter: last response, reason, payload and actions.

import { discard, replay } from "../dead_letter_actions.js";
import { get } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { responseLine, badge, button, code, definitionList, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, expiry, payloadSize, plural, time } from "../format.js";
import { sequenceRange } from "./dead_letters.js";

const REASONS = {
  refused: "the receiver refused it",
  exhausted: "its retries were exhausted",
  expired: "it had expired",
  erased: "its event was erased",
  skipped: "an operator skipped it",
  backlog: "its endpoint exceeded a backlog limit",
  missing: "its event was gone, although nothing had erased it",
  adopted: "an operator adopted a stream into which it does not fit",
  disabled: "its endpoint was disabled",
  removed: "its endpoint was removed",
};
const REPLAYS = ["Requested", "State", "New sequence", "Dead-lettered again"];

// The lane and sequence of the delivered replay.
function success(each) {
  const last = each.replays.at(-1);
  if (each.state !== "replayed" || !last) return null;
  const where = last.sequence === null ? "" : ` with sequence ${last.sequence} of lane ${last.lane}`;
  return h("p", { class: "success" }, `Its replay was delivered${where}.`);
}

const linkTo = (id) => h("a", { href: link("dead-letter", [String(id)]) }, `dead letter ${id}`);

function replays(each) {
  if (!each.replays.length) return null;
  return h("section", null, h("h2", null, "Replays"), table(REPLAYS, each.replays.map((one) => row([
    when(one.requested_at), badge(one.state),
    one.sequence === null ? (each.event ? "not yet" : plural(one.taken, "delivery", "deliveries")) : `${one.sequence} of lane ${one.lane}`,
    one.again ? linkTo(one.again) : "–",
  ], REPLAYS)), ""));
}

function draw(each, id) {
  const size = each.to_sequence - each.sequence + 1;
  return [
    h("h1", null, `Dead letter ${id} `, badge(each.state)),
    success(each),
    h("p", { class: "response" }, responseLine(each.last_response) ?? "No request was sent."),
    h("p", null, `Dead-lettered because ${REASONS[each.reason] ?? each.reason}, after ${plural(each.attempts, "attempt")}, `, when(each.at),
      each.event ? "." : `; it covers ${plural(size, "delivery", "deliveries")} that were not sent.`,
      each.again ? [" Its replay became ", linkTo(each.again), "."] : null),
    h("div", { class: "actions" },
      each.state === "dead" && button("Replay", () => replay(`dead letter ${id}`, { ids: [each.id] }, [each]), { kind: "main" }),
      each.state === "dead" && button("Discard", () => discard(`dead letter ${id}`, { ids: [each.id] }, [each])),
      each.event && h("a", { class: "button", href: link("trace", [each.event]) }, "Trace event")),
    each.event ? h("section", null, h("h2", null, "Payload"), each.payload !== null ? code(each.payload) : h("p", { class: "empty" }, each.content_type ? payloadSize(each) : "Erased or null.")) : null,
    replays(each),
    definitionList([
      ["Endpoint", h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint)],
      ["Event", each.event ? h("a", { href: link("trace", [each.event]) }, h("code", null, each.event)) : "a range of unsent deliveries"],
      ["Lane, sequence", h("span", null, h("code", null, each.lane), `, ${sequenceRange(each)}`)],
      ["Type", each.type], ["Key", each.key && h("a", { href: link("events", [], { key: each.key }) }, each.key)], ["Tenant", each.tenant],
      ["Reason", each.reason], ["Status", each.status === null ? null : String(each.status)], ["Attempts", count(each.attempts)],
      ["Dead-lettered", time(each.at)], each.event && ["Published", time(each.published_at)], each.event && ["Expires", expiry(each.expires_at)],
    ]),
    h("details", null, h("summary", null, "All fields"), code(each)),
  ];
}

export function view(place, [id]) {
  show(place, h("h1", null, `Dead letter ${id}`), h("p", { class: "empty" }, "Loading…"));
  return live(place, async (signal) => {
    show(place, draw(await get(`/v1/dead-letters/${encodeURIComponent(id)}`, {}, signal), id));
  }, { every: 5000, missing: `Dead letter ${id} not found.` });
}
