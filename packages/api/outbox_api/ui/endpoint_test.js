// Test of an endpoint: one signed request, or an examination of its broker.

import { name, post } from "./api.js";
import { h } from "./dom.js";
import { badge, code, definitionList, responseLine, row, table } from "./components.js";
import { confirm, notice, tryRequest } from "./dialogs.js";
import { duration } from "./format.js";

const OUTCOMES = {
  delivered: "The relay counts this as delivered",
  retried: "The relay would retry this delivery",
  dead_letter: "The relay would dead-letter this delivery immediately",
  disabled: "The relay would dead-letter this delivery and disable the endpoint",
};
const FINDINGS = ["", "Finding", "Action"];

function drawBroker(result) {
  const failed = result.outcome !== "delivered";
  return [
    h("p", { class: "response" }, failed ? "Deliveries would wait." : "The broker can be used."),
    result.findings.length ? table(FINDINGS, result.findings.map((each) => row([
      badge(each.is_error ? "problem" : "warning"), each.finding, each.action], FINDINGS)), "") : h("p", null, failed ? responseLine(result.response) : "No findings."),
    h("p", { class: "hint" }, "Access, version and settings were checked from the process of the API. Nothing was written to a stream."),
  ];
}

function drawResponse(result) {
  const { response } = result;
  return [
    h("p", { class: "response" }, responseLine(response) ?? "no response"),
    h("p", null, `${OUTCOMES[result.outcome] ?? result.outcome}.`),
    response.headers && h("details", null, h("summary", null, "Headers"), code(response.headers)),
    response.body && h("details", null, h("summary", null, "Body"), code(response.body)),
  ];
}

export async function sendTest(endpoint) {
  notice(`Testing ${endpoint}…`);
  const result = await tryRequest(() => post(`/v1/endpoints/${name(endpoint)}/test`));
  if (!result) return;
  const isBroker = result.method === "CHECK";
  await confirm(isBroker ? `Test of ${endpoint}` : `Test response of ${endpoint}`, [
    ...(isBroker ? drawBroker(result) : drawResponse(result)),
    definitionList([["URL", h("span", { class: "url" }, result.url)], ["Duration", duration(result.response.elapsed_ms / 1000)]]),
  ].filter(Boolean), { yes: "Close", no: null });
}
