// One endpoint: how it is, its lanes, and what can be done.

import { get, name, session } from "../api.js";
import { h, show } from "../dom.js";
import * as deeds from "../deeds.js";
import { lanes } from "../lanes.js";
import { live } from "../live.js";
import { answerLine, badge, button, code, facts, row, table, when } from "../parts.js";
import { link } from "../places.js";
import { capital, count, plural, time } from "../say.js";

const LANES = ["Lane", "#Owed", "#Done", "#Attempts", "Next try", "Last answer", "Blocked"];
const HANDS = ["When", "What", "Relay", "Why"];
const LANES_SHOWN = 64;
const LETTERS_MAX = 1000;

const isBlocked = (lane) => lane.blocked_seq !== null;
const blockOf = (lane) => `${lane.name}/${lane.blocked_seq}`;

// Find the dead letters that lanes wait for, once each: a lane knows their numbers alone.
async function find(endpoint, blocked, known, signal) {
  const wanted = blocked.filter((lane) => !known.has(blockOf(lane)));
  if (!wanted.length) return;
  const { items } = await get("/v1/dead-letters", { endpoint, limit: LETTERS_MAX }, signal);
  for (const lane of wanted) {
    const letter = items.find((each) => each.lane === lane.name && each.sequence <= lane.blocked_seq && lane.blocked_seq <= each.to_sequence);
    known.set(blockOf(lane), letter?.id ?? null);
  }
}

function blockedBy(endpoint, lane, known) {
  if (!isBlocked(lane)) return "";
  const id = known.get(blockOf(lane));
  return id ? h("a", { href: link("letter", [String(id)]) }, `blocked by dead letter ${id}`)
    : h("a", { href: link("dead", [], { endpoint }) }, `blocked by number ${lane.blocked_seq}`);
}

function actions(endpoint, each, blocked) {
  return h("div", { class: "actions" },
    each.state === "paused" ? button("Resume", () => deeds.resume(endpoint, blocked), { kind: "main" })
      : each.state === "active" ? button("Pause", () => deeds.pause(endpoint)) : null,
    each.state === "active" && blocked.length ? button("Let blocked lanes go on", () => deeds.goOn(endpoint, blocked), { kind: "main" })
      : each.state === "active" && each.health !== "healthy"
        ? button("Try now", () => deeds.simple(endpoint, "resume", "It is tried at once, slowly at first."), { title: "Forget the breaker, and try at once" }) : null,
    each.state === "disabled" ? button("Enable", () => deeds.simple(endpoint, "enable", `${endpoint} gets events again.`), { kind: "main" }) : null,
    button("Send a test", () => deeds.test(endpoint)),
    button("New secret", () => deeds.rotate(endpoint)),
    h("a", { class: "button", href: link("dead", [], { endpoint }) }, "Dead letters"));
}

function hands(found) {
  return h("section", null, h("h2", null, "Whose hands it went through"),
    table(HANDS, found.map((hand) => row([when(hand.at), hand.claimed ? "taken" : "let go", hand.relay, hand.why ?? ""], HANDS)), "Nobody's yet."));
}

// A delivery's own time says nothing while its endpoint is not well, or its lane is blocked.
function nextTry(each, lane) {
  if (!lane.next_attempt_at || each.state !== "active" || each.health !== "healthy" || isBlocked(lane)) return "–";
  return Date.parse(lane.next_attempt_at) <= session.now() ? "due" : when(lane.next_attempt_at);
}

export function view(place, [endpoint]) {
  const known = new Map();
  show(place, h("h1", null, endpoint), h("p", { class: "empty" }, "Looking…"));
  return live(place, async (signal) => {
    const told = await get(`/v1/endpoints/${name(endpoint)}`, {}, signal);
    const { endpoint: each, settings, health } = told;
    const blocked = told.lanes.filter(isBlocked);
    await find(endpoint, blocked, known, signal);
    const drawn = told.lanes.map((lane) => ({
      owed: lane.last_seq - lane.acked_seq, failing: lane.attempts > 0, blocked: isBlocked(lane) }));
    const owing = told.lanes.filter((lane) => lane.last_seq > lane.acked_seq || isBlocked(lane)).slice(0, LANES_SHOWN);
    show(place,
      h("h1", null, endpoint, " ", badge(each.condition)),
      actions(endpoint, each, blocked),
      facts([
        ["URL", h("span", { class: "url" }, each.url)],
        ["Types", each.types.join(", ")],
        settings.filter && ["Filter", h("code", null, settings.filter)],
        ["Tenant", each.all_tenants ? "all" : each.tenant ?? "none"],
        ["Owed", count(each.owed)],
        ["Dead letters", count(each.dead_letters)],
        each.state === "active" ? [capital(`${health.state} since`), when(health.since)]
          : [capital(`${each.state} since`), h("span", null, when(each.state_at), each.state_by && `, by ${each.state_by}`)],
        each.state_why && ["Why", each.state_why],
        health.held_until && Date.parse(health.held_until) > session.now() && ["Held by Retry-After", `until ${time(health.held_until)}`],
        health.last_answer && ["Last answer", answerLine(health.last_answer)],
        ["Retry", typeof settings.retry === "string" ? settings.retry : JSON.stringify(settings.retry)],
        ["On a dead letter", settings.on_dead_letter === "block" ? "the lane waits for an operator" : "the lane goes on"],
        ["Secrets", told.secrets.map((s) => (s.expires_at ? `old one until ${time(s.expires_at)}` : `since ${time(s.created_at)}`)).join("; ")],
        told.secrets[0]?.public_key && ["Public key", h("code", null, told.secrets[0].public_key)],
      ]),
      h("section", null,
        h("h2", null, "Lanes ", h("small", null, count(told.lanes.length))),
        h("div", { class: "strip" }, lanes(endpoint, drawn.slice(0, 256), { all: told.lanes.length })),
        table(LANES, owing.map((lane) => row([
          h("code", null, lane.name), count(lane.last_seq - lane.acked_seq),
          h("span", { title: "Acknowledged or given up" }, count(lane.acked_seq)),
          lane.probes ? `${count(lane.attempts)}, ${plural(lane.probes, "of them a probe", "of them probes")}` : count(lane.attempts),
          nextTry(each, lane), answerLine(lane.last_answer) ?? "–", blockedBy(endpoint, lane, known),
        ], LANES, lane.name)), "No lane owes anything.")),
      session.tenant === null ? hands(told.hands) : null,
      h("details", null, h("summary", null, "All settings"), code(settings)));
    document.title = `${endpoint} – outbox`;
  }, { missing: `There is no endpoint ${endpoint}.` });
}
