// What an endpoint is set to, and which relays have owned it.

import { session } from "./api.js";
import { code, definitionList, row, table, when } from "./components.js";
import { h } from "./dom.js";
import { plural, time } from "./format.js";

const OWNERSHIP = ["When", "Change", "Relay", "Reason"];
const DAY_MS = 86_400_000;

export const isBroker = (url) => !/^https?:/i.test(url);
export const hasCredentials = (settings) => Object.keys(settings.headers).some((each) => each.toLowerCase() === "authorization");

// A receiver that sent unsolicited data gets one request per connection for a day.
function keepAlive(settings, health) {
  if (!settings.keep_alive) return ["Keep-alive", "off"];
  const until = Date.parse(health.unsolicited_at ?? "") + DAY_MS;
  return until > session.now() && ["Keep-alive", h("span", null, `suspended until ${time(new Date(until).toISOString())}, unsolicited data `, when(health.unsolicited_at))];
}

const secretList = (secrets) => h("ul", { class: "plain" }, secrets.map((each) => h("li", null, each.expires_at ? ["old, until ", h("time", null, time(each.expires_at))] : ["since ", h("time", null, time(each.created_at))])));

function compatSignature({ preset, until }) {
  if (!until) return preset;
  const days = Math.floor((Date.parse(until) - session.now()) / DAY_MS);
  return h("span", null, `${preset}, ${days < 0 ? "ended" : `${plural(days, "day")} left`}, until `, h("time", null, time(until)));
}

function access({ endpoint, settings, secrets, certificate }) {
  if (isBroker(endpoint.url)) return [["Credentials", hasCredentials(settings) ? "set" : "none"], certificate && ["Client certificate", certificate.subject ?? "set"]];
  const signing = secrets.filter((each) => !each.compat);
  return [
    ["Secrets", secretList(signing)],
    signing[0]?.public_key && ["Public key", h("code", null, signing[0].public_key)],
    settings.compat && ["Compat signature", compatSignature(settings.compat)],
    settings.compat && ["Compat secrets", secretList(secrets.filter((each) => each.compat))],
    certificate && ["Client certificate", certificate.subject ?? "set"],
  ];
}

function ownershipHistory(records) {
  return h("section", null, h("h2", null, "Ownership history"),
    table(OWNERSHIP, records.map((each) => row([when(each.at), each.claimed ? "acquired" : "released", each.relay, each.reason ?? ""], OWNERSHIP)), "No relay has acquired it yet."));
}

export function settingsTab(detail) {
  const { endpoint: each, settings, health } = detail;
  return [
    h("section", null, h("h2", null, "What it receives"), definitionList([
      ["URL", h("span", { class: "url" }, each.url)],
      ["Types", each.types.join(", ")],
      settings.filter && ["Filter", h("code", null, settings.filter)],
      ["Tenant", each.all_tenants ? "all" : each.tenant ?? "none"],
      ["Format", settings.format],
    ])),
    h("section", null, h("h2", null, "How it is delivered"), definitionList([
      ["Retry", (typeof settings.retry === "string" ? settings.retry : JSON.stringify(settings.retry)).replaceAll(",", ", ")],
      ["On dead letter", settings.on_dead_letter === "block" ? "block the lane" : "continue the lane"],
      settings.on_missing === "hold" && ["On missing event", "hold the lane"],
      settings.on_forgotten === "refill" && ["On forgotten messages", "refill the stream"],
      !settings.probes && ["Probes", "none: only the deliveries' own attempts"],
      settings.keep_responses !== "all" && ["Responses kept", settings.keep_responses === "none" ? "none" : "of failed attempts"],
      keepAlive(settings, health),
      settings.contact && ["Contact", settings.contact],
    ])),
    h("section", null, h("h2", null, "Access"), definitionList(access(detail))),
    h("details", null, h("summary", null, "All settings"), code(settings)),
    session.tenant === null ? ownershipHistory(detail.ownership_history) : null,
  ];
}
