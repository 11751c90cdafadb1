// The relays, and what the doctor says.

import { get } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { badge, button, operator, row, table, when } from "../parts.js";
import { count, duration, plural, sentence } from "../say.js";
import { notice } from "../talk.js";

const HEADS = ["Relay", "State", "Does", "#Endpoints", "Version", "Since"];
const FINDINGS = ["", "About", "What", "What to do"];

const listed = (found) => table(FINDINGS, found.map((each) => row([
  badge(each.severity), each.check.replaceAll("_", " "), each.says, each.do ?? "",
], FINDINGS)), "");

// What needs somebody, the worst first; what is as it should be is folded.
function diagnosed({ findings }) {
  const of = (severity) => findings.filter((each) => each.severity === severity);
  const [problems, warnings] = [of("problem"), of("warning")];
  const fine = findings.filter((each) => !problems.includes(each) && !warnings.includes(each));
  const wrong = [...problems, ...warnings];
  const told = [problems.length && plural(problems.length, "problem"), warnings.length && plural(warnings.length, "warning")].filter(Boolean);
  return [
    h("p", { class: "summary" }, h("b", null, told.length ? told.join(", ") : "Everything is fine.")),
    wrong.length ? listed(wrong) : null,
    fine.length ? h("details", null, h("summary", null, `${plural(fine.length, "check")} fine`), listed(fine)) : null,
  ];
}

export function view(place) {
  const findings = h("div");
  const relays = h("div", null, h("p", { class: "empty" }, "Looking…"));
  async function examine(event) {
    const { target } = event;
    target.disabled = true;
    show(findings, h("p", { class: "empty" }, "The doctor is looking; it takes a few seconds."));
    try {
      show(findings, diagnosed(await get("/v1/doctor")));
    } catch (error) {
      show(findings, null);
      notice(sentence(error.message), "bad");
    }
    target.disabled = false;
  }
  show(place, h("h1", null, "Replicas"), relays,
    h("section", null, h("h2", null, "Doctor"), h("div", { class: "actions" }, button("Examine", examine, { scope: "read" })), findings));
  return live(place, async (signal) => {
    const told = await get("/v1/status", { limit: 1 }, signal);
    const { cursor } = told;
    show(relays,
      table(HEADS, told.replicas.map((each) => row([
        each.name, badge(each.alive ? "alive" : "lapsed"), each.leads ? "sequences" : "stands by", count(each.endpoints), each.version, when(each.started_at),
      ], HEADS, each.id)), ["No relay is running", operator() ? [": ", h("code", null, "outbox relay")] : null, "."]),
      h("p", { class: "hint" }, `Sequenced up to event ${count(cursor.high)} in batch ${count(cursor.batch)}, `, when(cursor.at), ". ",
        cursor.waiting_s === null ? "Nothing waits." : `Events wait for ${duration(cursor.waiting_s)}.`,
        told.open_gaps ? ` ${plural(told.open_gaps, "open gap")}: transactions that have an id and have not ended.` : ""));
  });
}
