// One dead letter: what the receiver said, why it was given up, and what can be done.

import { discard, replay } from "../again.js";
import { get } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { answerLine, badge, button, code, facts, row, table, when } from "../parts.js";
import { link } from "../places.js";
import { count, end, plural, time } from "../say.js";
import { numbers } from "./dead.js";

const WHY = {
  refused: "its receiver refused it",
  exhausted: "its retries ended",
  expired: "it had expired",
  erased: "its event was erased",
  backlog: "its endpoint's backlog became too long or too old",
  disabled: "its endpoint was disabled",
  removed: "its endpoint was removed",
};
const REPLAYS = ["Asked", "State", "New number", "Then"];

const to = (id) => h("a", { href: link("letter", [String(id)]) }, `dead letter ${id}`);

function replays(each) {
  if (!each.replays.length) return null;
  return h("section", null, h("h2", null, "Sent again"), table(REPLAYS, each.replays.map((one) => row([
    when(one.asked_at), badge(one.state),
    one.sequence === null ? (each.event ? "not yet" : plural(one.taken, "delivery", "deliveries")) : `${one.sequence} of lane ${one.lane}`,
    one.again ? to(one.again) : "–",
  ], REPLAYS)), ""));
}

function drawn(each, id) {
  const size = each.to_sequence - each.sequence + 1;
  return [
    h("h1", null, `Dead letter ${id} `, badge(each.state)),
    h("p", { class: "said" }, answerLine(each.last_answer) ?? "The receiver was not asked."),
    h("p", null, `Given up because ${WHY[each.reason] ?? each.reason}, after ${plural(each.attempts, "attempt")}, `, when(each.at),
      each.event ? "." : `; it stands for ${plural(size, "delivery", "deliveries")} that were not sent.`,
      each.again ? [" Sent again, it became ", to(each.again), "."] : null),
    h("div", { class: "actions" },
      each.state === "dead" && button("Send again", () => replay(`dead letter ${id}`, { ids: [each.id] }, [each]), { kind: "main" }),
      each.state === "dead" && button("Discard", () => discard(`dead letter ${id}`, { ids: [each.id] }, [each])),
      each.event && h("a", { class: "button", href: link("trace", [each.event]) }, "The event's life")),
    each.event ? h("section", null, h("h2", null, "Payload"), each.payload === null ? h("p", { class: "empty" }, "It was erased, or is null.") : code(each.payload)) : null,
    replays(each),
    facts([
      ["Endpoint", h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint)],
      ["Event", each.event ? h("a", { href: link("trace", [each.event]) }, h("code", null, each.event)) : "a range of deliveries that were never sent"],
      ["Lane, number", h("span", null, h("code", null, each.lane), `, ${numbers(each)}`)],
      ["Type", each.type], ["Key", each.key && h("a", { href: link("events", [], { key: each.key }) }, each.key)], ["Tenant", each.tenant],
      ["Reason", each.reason], ["Status", each.status === null ? null : String(each.status)], ["Attempts", count(each.attempts)],
      ["Given up", time(each.at)], each.event && ["Published", time(each.published_at)], each.event && ["Expires", end(each.expires_at)],
    ]),
    h("details", null, h("summary", null, "All that is known"), code(each)),
  ];
}

export function view(place, [id]) {
  show(place, h("h1", null, `Dead letter ${id}`), h("p", { class: "empty" }, "Looking…"));
  return live(place, async (signal) => {
    show(place, drawn(await get(`/v1/dead-letters/${encodeURIComponent(id)}`, {}, signal), id));
  }, { every: 5000, missing: `There is no dead letter ${id}.` });
}
