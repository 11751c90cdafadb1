// One endpoint: state, settings, lanes and actions.

import { get, name, session } from "../api.js";
import { h, show } from "../dom.js";
import * as access from "../endpoint_access.js";
import * as endpointActions from "../endpoint_actions.js";
import { removeEndpoint } from "../endpoint_removal.js";
import { sendTest } from "../endpoint_test.js";
import { dayCharts, readHistory } from "../history.js";
import { lanes } from "../lanes.js";
import { live } from "../live.js";
import { attemptCount, condition, responseLine, button, code, definitionList, row, table, when } from "../components.js";
import { retryAction, stuckAction } from "../stuck_lane.js";
import { link } from "../router.js";
import { capital, count, time } from "../format.js";
import { visible } from "../text.js";

const LANES = ["Lane", "#Pending", "#Completed", "#Attempts", "Next attempt", "Last response", "Stuck"];
const OWNERSHIP = ["When", "Change", "Relay", "Reason"];
const LANES_SHOWN = 64;
const DEAD_LETTERS_MAX = 1000;

const isBlocked = (lane) => lane.blocked_seq !== null;
const blockKey = (lane) => `${lane.name}/${lane.blocked_seq}`;

// Find the dead letters that block lanes, once each: a lane has their sequence numbers only.
async function findBlockers(endpoint, blocked, known, signal) {
  const unknown = blocked.filter((lane) => !known.has(blockKey(lane)));
  if (!unknown.length) return;
  const { items } = await get("/v1/dead-letters", { endpoint, limit: DEAD_LETTERS_MAX }, signal);
  for (const lane of unknown) {
    const deadLetter = items.find((each) => each.lane === lane.name && each.sequence <= lane.blocked_seq && lane.blocked_seq <= each.to_sequence);
    known.set(blockKey(lane), deadLetter?.id ?? null);
  }
}

function stuck(endpoint, lane, known, { endpoint: { failing_lanes: failingLanes }, health }) {
  if (!isBlocked(lane)) {
    const next = { name: lane.name, sequence: lane.acked_seq + 1, behind: lane.last_seq - lane.acked_seq - 1, last_response: lane.last_response };
    return lane.attempts ? stuckAction(endpoint, next, { health: health.state, failingLanes }) : "";
  }
  const id = known.get(blockKey(lane));
  return id ? h("a", { href: link("dead-letter", [String(id)]) }, `blocked by dead letter ${id}`)
    : h("a", { href: link("dead-letters", [], { endpoint }) }, `blocked at sequence ${lane.blocked_seq}`);
}

const hasCredentials = (settings) => Object.keys(settings.headers).some((each) => each.toLowerCase() === "authorization");

function actionBar(endpoint, detail, blocked, isBroker) {
  const { endpoint: each, settings, certificate } = detail;
  return h("div", { class: "actions" },
    each.state === "paused" ? button("Resume", () => endpointActions.resume(endpoint, blocked), { kind: "main" })
      : each.state === "active" ? button("Pause", () => endpointActions.pause(endpoint)) : null,
    each.state === "active" && blocked.length ? button("Unblock lanes", () => endpointActions.unblock(endpoint, blocked), { kind: "main" })
      : each.state === "active" && (each.health !== "healthy" || each.failing_lanes)
        ? retryAction(endpoint) : null,
    each.state === "disabled" ? button("Enable", () => endpointActions.runVerb(endpoint, "enable", `${endpoint} is enabled. It receives new events.`), { kind: "main" }) : null,
    session.may("operate") && h("a", { class: "button", href: link("edit-endpoint", [endpoint]) }, "Edit"),
    button(isBroker ? "Test" : "Send test event", () => sendTest(endpoint)),
    h("a", { class: "button", href: link("deliveries", [], { endpoint }) }, "Deliveries"),
    h("a", { class: "button", href: link("preview", [endpoint]) }, "Preview"),
    isBroker ? button("Credentials", () => access.setCredentials(endpoint, hasCredentials(settings)))
      : button("Rotate secret", () => access.rotateSecret(endpoint)),
    button("Certificate", () => access.setCertificate(endpoint, certificate), { title: "Client certificate for mutual TLS" }),
    h("a", { class: "button", href: link("dead-letters", [], { endpoint }) }, "Dead letters"),
    h("a", { class: "button", href: link("journal", [], { endpoint }) }, "Journal"),
    button("Remove", () => removeEndpoint(endpoint)));
}

function ownershipHistory(records) {
  return h("section", null, h("h2", null, "Ownership history"),
    table(OWNERSHIP, records.map((each) => row([when(each.at), each.claimed ? "acquired" : "released", each.relay, each.reason ?? ""], OWNERSHIP)), "No relay has acquired it yet."));
}

const DISTRUST_MS = 86_400_000;

// A receiver that sent unsolicited data gets one request per connection for a day.
function keepAlive(settings, health) {
  if (!settings.keep_alive) return ["Keep-alive", "off"];
  const until = Date.parse(health.unsolicited_at ?? "") + DISTRUST_MS;
  return until > session.now() && ["Keep-alive", h("span", null, `suspended until ${time(new Date(until).toISOString())}, unsolicited data `, when(health.unsolicited_at))];
}

// While the breaker is open or the lane is blocked, the retry time of the delivery does not apply.
function nextAttempt(each, lane) {
  if (!lane.next_attempt_at || each.state !== "active" || each.health !== "healthy" || isBlocked(lane)) return "–";
  return Date.parse(lane.next_attempt_at) <= session.now() ? "due" : when(lane.next_attempt_at);
}

export function view(place, [endpoint]) {
  const known = new Map();
  let history = null;
  let detail = null;
  show(place, h("h1", null, endpoint), h("p", { class: "empty" }, "Loading…"));
  const details = readHistory(async (signal) => {
    history = await get(`/v1/endpoints/${name(endpoint)}/history`, {}, signal);
    draw();
  });
  function draw() {
    const { endpoint: each, settings, health } = detail;
    const blocked = detail.lanes.filter(isBlocked);
    const isBroker = !/^https?:/i.test(each.url);
    const bars = detail.lanes.map((lane) => ({
      pending: lane.last_seq - lane.acked_seq, failing: lane.attempts > 0, blocked: isBlocked(lane) }));
    const busy = detail.lanes.filter((lane) => lane.last_seq > lane.acked_seq || isBlocked(lane)).slice(0, LANES_SHOWN);
    show(place,
      h("h1", null, endpoint, " ", condition(each, each.lanes)),
      actionBar(endpoint, detail, blocked, isBroker),
      definitionList([
        ["URL", h("span", { class: "url" }, each.url)],
        ["Types", each.types.join(", ")],
        settings.filter && ["Filter", h("code", null, settings.filter)],
        ["Tenant", each.all_tenants ? "all" : each.tenant ?? "none"],
        ["Pending", count(each.pending)],
        ["Dead letters", count(each.dead_letters)],
        each.state === "active" ? (health.state !== "healthy" || !each.failing_lanes) && [capital(`${health.state} since`), when(health.since)]
          : [capital(`${each.state} since`), h("span", null, when(each.state_at), each.state_by && `, by ${each.state_by}`)],
        each.state_comment && ["Comment", each.state_comment],
        health.held_until && Date.parse(health.held_until) > session.now() && ["Hold-off (Retry-After)", `until ${time(health.held_until)}`],
        health.last_response && ["Last response", responseLine(health.last_response)],
        keepAlive(settings, health),
        ["Retry", typeof settings.retry === "string" ? settings.retry : JSON.stringify(settings.retry)],
        ["On dead letter", settings.on_dead_letter === "block" ? "block the lane" : "continue the lane"],
        !settings.probes && ["Probes", "none: only the deliveries' own attempts"],
        settings.keep_responses !== "all" && ["Responses kept", settings.keep_responses === "none" ? "none" : "of failed attempts"],
        settings.on_missing === "hold" && ["On missing event", "hold the lane"],
        settings.on_forgotten === "refill" && ["On forgotten messages", "refill the stream"],
        ["Format", settings.format],
        isBroker ? ["Credentials", hasCredentials(settings) ? "set" : "none"] : ["Secrets", detail.secrets.map((s) => (s.expires_at ? `old secret until ${time(s.expires_at)}` : `since ${time(s.created_at)}`)).join("; ")],
        detail.certificate && ["Client certificate", `${detail.certificate.subject ?? "set"}`],
        !isBroker && detail.secrets[0]?.public_key && ["Public key", h("code", null, detail.secrets[0].public_key)],
      ]),
      dayCharts(history, session.now()),
      h("section", null,
        h("h2", null, "Lanes ", h("small", null, count(detail.lanes.length))),
        h("div", { class: "strip" }, lanes(endpoint, bars.slice(0, 256), { all: detail.lanes.length })),
        table(LANES, busy.map((lane) => row([
          h("code", null, lane.name), count(lane.last_seq - lane.acked_seq),
          h("span", { title: "Acknowledged or dead-lettered" }, count(lane.acked_seq)),
          attemptCount(lane),
          nextAttempt(each, lane), responseLine(lane.last_response) ?? "–", stuck(endpoint, lane, known, detail),
        ], LANES, lane.name)), "No pending deliveries.")),
      session.tenant === null ? ownershipHistory(detail.ownership_history) : null,
      h("details", null, h("summary", null, "All settings"), code(settings)));
  }
  return live(place, async (signal) => {
    detail = await get(`/v1/endpoints/${name(endpoint)}`, {}, signal);
    await findBlockers(endpoint, detail.lanes.filter(isBlocked), known, signal);
    draw();
    document.title = visible(`${endpoint} – outbox`);
  }, { missing: `Endpoint ${endpoint} not found.`, details });
}
