// Relay instances and diagnostics.

import { get } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { badge, button, isOperator, row, table, when } from "../components.js";
import { count, duration, plural, sentence } from "../format.js";
import { notice } from "../dialogs.js";

const HEADS = ["Relay", "State", "Role", "#Endpoints", "Version", "Since"];
const FINDINGS = ["", "Check", "Finding", "Action"];

const findingsTable = (findings) => table(FINDINGS, findings.map((each) => row([
  badge(each.severity), each.check.replaceAll("_", " "), each.message, each.action ?? "",
], FINDINGS)), "");

// Problems first, then warnings; passed checks are collapsed.
function drawFindings({ findings }) {
  const bySeverity = (severity) => findings.filter((each) => each.severity === severity);
  const [problems, warnings] = [bySeverity("problem"), bySeverity("warning")];
  const passed = findings.filter((each) => !problems.includes(each) && !warnings.includes(each));
  const failed = [...problems, ...warnings];
  const counts = [problems.length && plural(problems.length, "problem"), warnings.length && plural(warnings.length, "warning")].filter(Boolean);
  return [
    h("p", { class: "summary" }, h("b", null, counts.length ? counts.join(", ") : "All checks passed.")),
    failed.length ? findingsTable(failed) : null,
    passed.length ? h("details", null, h("summary", null, `${plural(passed.length, "check")} passed`), findingsTable(passed)) : null,
  ];
}

export function view(place, _, { checks } = {}) {
  const findings = h("div");
  const relays = h("div", null, h("p", { class: "empty" }, "Loading…"));
  const run = button("Run checks", runChecks, { scope: "read" });
  async function runChecks() {
    run.disabled = true;
    show(findings, h("p", { class: "empty" }, "Running checks. This takes a few seconds."));
    try {
      show(findings, drawFindings(await get("/v1/doctor")));
    } catch (error) {
      show(findings, null);
      notice(sentence(error.message), "bad");
    }
    run.disabled = false;
  }
  const diagnostics = h("section", null, h("h2", null, "Diagnostics"), h("div", { class: "actions" }, run), findings);
  show(place, h("h1", null, "Replicas"), relays);
  return live(place, async (signal) => {
    const status = await get("/v1/status", { limit: 1 }, signal);
    const { cursor } = status;
    show(relays,
      table(HEADS, status.replicas.map((each) => row([
        each.name, badge(each.alive ? "alive" : "lapsed"), each.leads ? "sequencer" : "standby", count(each.endpoints), each.version, when(each.started_at),
      ], HEADS, each.id)), ["No relay is running", isOperator() ? [": ", h("code", null, "outbox relay")] : null, "."]),
      h("p", { class: "hint" }, `Sequenced up to event ${count(cursor.high)} in batch ${count(cursor.batch)}, `, when(cursor.at), ". ",
        cursor.waiting_s === null ? "No unsequenced events." : `The oldest unsequenced event is ${duration(cursor.waiting_s)} old.`,
        status.open_gaps ? ` ${plural(status.open_gaps, "open gap")}: ids of transactions that have not ended.` : ""));
    // Below the table, which would move it.
    if (diagnostics.isConnected) return;
    place.append(diagnostics);
    // A link named "Run checks" leads here.
    if (checks === "run") runChecks();
  });
}
