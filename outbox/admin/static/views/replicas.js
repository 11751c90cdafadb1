// The relays, and what the doctor says.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { pulse } from "../main.js";
import { badge, button, notice, row, table } from "../parts.js";
import { ago, count, duration } from "../say.js";

const HEADS = ["Relay", "State", "Does", "#Endpoints", "Version", "Since"];
const FINDINGS = ["", "About", "What", "What to do"];

export function view(place) {
  const findings = h("div");
  const relays = h("div");
  async function examine(event) {
    event.target.disabled = true;
    show(findings, h("p", { class: "empty" }, "The doctor is looking; it takes a few seconds."));
    try {
      const told = await get("/v1/doctor");
      show(findings, table(FINDINGS, told.findings.map((each) => row([
        badge(each.severity), each.check.replaceAll("_", " "), each.says, each.do ?? "",
      ], FINDINGS)), "Nothing to say."));
    } catch (error) {
      show(findings, null);
      notice(error.message, "bad");
    }
    event.target.disabled = false;
  }
  show(place, h("h1", null, "Replicas"), relays,
    h("section", null, h("h2", null, "Doctor"), h("div", { class: "actions" }, button("Examine", examine, { scope: "read" })), findings));
  return live(async (signal) => {
    const told = await get("/v1/status", { limit: 1 }, signal);
    const now = session.now();
    const { cursor } = told;
    show(relays,
      table(HEADS, told.replicas.map((each) => row([
        each.name, badge(each.alive ? "alive" : "lapsed"), each.leads ? "sequences" : "stands by", count(each.endpoints), each.version, ago(each.started_at, now),
      ], HEADS)), "No relay is running: outbox relay."),
      h("p", { class: "hint" }, `Sequenced up to event ${count(cursor.high)} in batch ${count(cursor.batch)}, ${ago(cursor.at, now)}. `,
        cursor.waiting_s === null ? "Nothing waits." : `Events wait for ${duration(cursor.waiting_s)}.`,
        told.open_gaps ? ` ${count(told.open_gaps)} open gaps: transactions that have an id and have not ended.` : ""));
  }, pulse);
}
