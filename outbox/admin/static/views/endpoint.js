// One endpoint: how it is, its lanes, and what can be done.

import { get, name, post, session } from "../api.js";
import { h, show } from "../dom.js";
import { lanes } from "../draw.js";
import { live } from "../live.js";
import { link, pulse } from "../main.js";
import { act, ask, badge, button, code, facts, field, row, stateOf, table, why } from "../parts.js";
import { ago, count, time } from "../say.js";

const LANES = ["Lane", "#Owed", "#Acknowledged", "#Attempts", "Next try", "Last answer", ""];
const HANDS = ["When", "What", "Relay", "Why"];
const LANES_SHOWN = 64;

const saidShort = (answer) => answer && `${answer.status ?? answer.failure ?? ""} ${answer.detail ?? ""}`.trim();

async function pause(endpoint) {
  const told = await ask(`Pause ${endpoint}?`, [h("p", null, "Nothing is sent until it is resumed; events go on being numbered and kept."), why()], { yes: "Pause" });
  if (told) await act(() => post(`/v1/endpoints/${name(endpoint)}/pause`, { why: told.why || null }), `${endpoint} is paused.`);
}

async function rotate(endpoint) {
  const told = await ask(`A new secret for ${endpoint}?`, [
    h("p", null, "Deliveries are signed with both secrets until the old one ends."),
    field("The old one goes on for", h("select", { name: "overlap" },
      [["24h", "a day"], ["7d", "a week"], ["1h", "an hour"], ["0s", "not at all"]].map(([value, text]) => h("option", { value }, text)))),
  ], { yes: "Make it" });
  if (!told) return;
  const made = await act(() => post(`/v1/endpoints/${name(endpoint)}/rotate-secret`, { overlap: told.overlap }), "A new secret was made.");
  if (made) {
    await ask(`The new secret of ${endpoint}`, [h("p", null, "It is shown this once. Give it to the receiver now."),
      h("input", { readonly: true, value: made.secret, "aria-label": "Secret", onclick: (event) => event.target.select() })], { yes: "I have it", no: null });
  }
}

async function test(endpoint) {
  const told = await act(() => post(`/v1/endpoints/${name(endpoint)}/test`), "");
  if (told) await ask(`What ${endpoint} answered`, code(told), { yes: "Close", no: null });
}

async function simple(endpoint, verb, done) {
  await act(() => post(`/v1/endpoints/${name(endpoint)}/${verb}`, {}), done);
}

export function view(place, [endpoint]) {
  show(place, h("h1", null, endpoint), h("p", { class: "empty" }, "Looking…"));
  return live(async (signal) => {
    const told = await get(`/v1/endpoints/${name(endpoint)}`, {}, signal);
    const { endpoint: each, settings, health } = told;
    const state = stateOf(each);
    const now = session.now();
    const drawn = told.lanes.map((lane) => ({
      owed: lane.last_seq - lane.acked_seq, failing: lane.attempts > 0, blocked: lane.blocked_seq !== null }));
    const owing = told.lanes.filter((lane) => lane.last_seq > lane.acked_seq || lane.blocked_seq !== null).slice(0, LANES_SHOWN);
    show(place,
      h("h1", null, endpoint, " ", badge(state)),
      h("div", { class: "actions" },
        each.state === "paused" ? button("Resume", () => simple(endpoint, "resume", `${endpoint} goes on.`), { kind: "main" })
          : each.state === "active" ? button("Pause", () => pause(endpoint)) : null,
        each.state === "active" && state !== "healthy"
          ? button("Try now", () => simple(endpoint, "resume", "It is tried at once, slowly at first."), { title: "Forget the breaker, and try at once" }) : null,
        each.state === "disabled" ? button("Enable", () => simple(endpoint, "enable", `${endpoint} gets events again.`), { kind: "main" }) : null,
        button("Send a test", () => test(endpoint)),
        button("New secret", () => rotate(endpoint)),
        h("a", { class: "button", href: link("dead", [], { endpoint }) }, "Dead letters")),
      facts([
        ["URL", h("span", { class: "url" }, each.url)],
        ["Types", each.types.join(", ")],
        settings.filter && ["Filter", h("code", null, settings.filter)],
        ["Tenant", each.all_tenants ? "all" : each.tenant ?? "none"],
        ["Owed", count(each.owed)],
        ["Dead letters", count(each.dead_letters)],
        [`${state} since`, `${ago(each.state === "active" ? health.since : each.state_at, now)}${each.state_by && each.state !== "active" ? `, by ${each.state_by}` : ""}`],
        each.state_why && ["Why", each.state_why],
        health.held_until && Date.parse(health.held_until) > now && ["Held by Retry-After", `until ${time(health.held_until)}`],
        health.last_answer && ["Last answer", saidShort(health.last_answer)],
        ["Retry", typeof settings.retry === "string" ? settings.retry : JSON.stringify(settings.retry)],
        ["On a dead letter", settings.on_dead_letter === "block" ? "the lane waits for an operator" : "the lane goes on"],
        ["Secrets", told.secrets.map((s) => (s.expires_at ? `old one until ${time(s.expires_at)}` : `since ${time(s.created_at)}`)).join("; ")],
      ]),
      h("section", null,
        h("h2", null, "Lanes ", h("small", null, count(told.lanes.length))),
        h("div", { class: "strip" }, lanes(endpoint, drawn.slice(0, 256), told.lanes.length)),
        table(LANES, owing.map((lane) => row([
          h("code", null, lane.name), count(lane.last_seq - lane.acked_seq), count(lane.acked_seq), count(lane.attempts),
          !lane.next_attempt_at ? "–" : Date.parse(lane.next_attempt_at) <= now ? "due" : ago(lane.next_attempt_at, now), saidShort(lane.last_answer) ?? "–",
          lane.blocked_seq !== null ? badge("blocked", `number ${lane.blocked_seq}`) : "",
        ], LANES)), "No lane owes anything.")),
      h("section", null, h("h2", null, "Whose hands it went through"),
        table(HANDS, told.hands.map((hand) => row([
          h("time", { datetime: hand.at, title: time(hand.at) }, ago(hand.at, now)), hand.claimed ? "taken" : "let go", hand.relay, hand.why ?? ""], HANDS)), "Nobody's yet.")),
      h("details", null, h("summary", null, "All settings"), code(settings)));
    document.title = `${endpoint} – outbox`;
  }, pulse);
}
