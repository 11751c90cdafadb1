// Dead letters: find them, look at one, send them again, set them aside.

import { get, post, session } from "../api.js";
import { h, show } from "../dom.js";
import { live } from "../live.js";
import { link, pulse } from "../main.js";
import { act, ask, badge, button, code, facts, field, filters, pages, row, table, why } from "../parts.js";
import { ago, count, plural, time } from "../say.js";

const HEADS = ["", "Id", "Endpoint", "#Number", "Type", "Reason", "Status", "#Attempts", "When", "State"];
const JOBS = ["Job", "State", "Of", "Asked", "Progress", ""];
const STATES = [["dead", "dead"], ["replaying", "replaying"], ["replayed", "replayed"], ["dead_again", "dead again"], ["discarded", "discarded"], ["all", "all"]];
const REASONS = ["", "refused", "exhausted", "expired", "erased", "backlog", "disabled", "removed"].map((each) => [each, each || "any"]);

const numbers = (each) => (each.sequence === each.to_sequence ? String(each.sequence) : `${each.sequence}–${each.to_sequence}`);

function chosen(values) {
  const { state, ...rest } = values;
  return rest;
}

async function replay(what, body, after) {
  const plan = await act(() => post("/v1/dead-letters/replay", { ...body, dry_run: true }), "");
  if (!plan) return;
  const told = await ask(`Send ${what} again?`, [
    h("p", null, `${plural(plan.replaying, "dead letter")} would be sent again.`),
    Object.entries(plan.skipped).map(([reason, n]) => h("p", null, `${count(n)} left alone: ${reason}.`)),
    h("p", { class: "hint" }, "Each gets a new number at the end of its lane and names the one it stands for. Attempts begin at zero, and live events go first."),
    field("At most so many a second", h("input", { name: "rate", type: "number", min: "0.1", step: "any" }), "Empty: as fast as is good."),
  ], { yes: "Send again" });
  if (!told) return;
  const rate = told.rate ? { rate: Number(told.rate) } : {};
  await act(() => post("/v1/dead-letters/replay", { ...body, ...rate }), (done) => `${plural(done.replaying, "dead letter")} will be sent again${done.job ? `, as job ${done.job}` : ""}.`);
  after();
}

async function discard(what, body, after) {
  const plan = await act(() => post("/v1/dead-letters/discard", { ...body, dry_run: true }), "");
  if (!plan) return;
  const told = await ask(`Set ${what} aside?`, [
    h("p", null, `${plural(plan.discarded, "dead letter")} would never be sent. Receivers go on missing these numbers.`), why()],
  { yes: "Discard", kind: "danger" });
  if (!told) return;
  await act(() => post("/v1/dead-letters/discard", { ...body, why: told.why || null }), "Discarded; it stands in the journal.");
  after();
}

function jobs(found, again) {
  const now = session.now();
  return h("section", null, h("h2", null, "Being sent again"), table(JOBS, found.map((job) => row([
    String(job.id), badge(job.state), job.kind === "history" ? `history of ${job.endpoint}` : "dead letters",
    `${ago(job.asked_at, now)} by ${job.asked_by}`,
    job.all ? h("span", null, h("progress", { max: job.all, value: job.done, "aria-label": "Progress" }), ` ${count(job.done)} of ${count(job.all)}`) : count(job.taken),
    button("Stop it", () => act(() => post(`/v1/replays/${job.id}/abort`), `Job ${job.id} takes nothing more.`).then(again)),
  ], JOBS)), "Nothing."));
}

export function view(place, _, values) {
  const picked = new Set();
  let some = false;
  const counted = h("p", { class: "hint" });
  const running = h("div");
  const bar = h("div", { class: "actions sticky" });
  const go = (next) => { location.hash = link("dead", [], next); };
  const list = pages(
    (after) => get("/v1/dead-letters", { ...values, limit: 50, after }),
    (items) => noted(items) && table(HEADS, items.map((each) => row([
      each.state === "dead" && session.may("operate") && h("input", { type: "checkbox", "aria-label": `Choose dead letter ${each.id}`, checked: picked.has(each.id),
        onchange: (event) => { if (event.target.checked) picked.add(each.id); else picked.delete(each.id); paint(); } }),
      h("a", { href: link("letter", [String(each.id)]) }, String(each.id)),
      h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint),
      numbers(each),
      each.type ?? "a range",
      each.reason,
      each.status === null ? "–" : String(each.status),
      count(each.attempts),
      h("time", { datetime: each.at, title: time(each.at) }, ago(each.at, session.now())),
      badge(each.state),
    ], HEADS, each.id)), values.state && values.state !== "dead" ? "There is none like this." : "There is no dead letter like this: everything else arrived, or is on its way."));

  function noted(items) {
    if (some !== items.length > 0) {
      some = items.length > 0;
      paint();
    }
    return true;
  }

  function again() {
    picked.clear();
    list.load().catch((error) => pulse(error));
    counts();
    paint();
  }

  function paint() {
    const ids = [...picked];
    const state = (values.state ?? "dead") === "dead";
    const matching = Object.keys(chosen(values)).length ? { ...chosen(values), type: values.type ? [values.type] : undefined } : { all: true };
    show(bar,
      ids.length ? [button(`Send ${count(ids.length)} again`, () => replay(plural(ids.length, "dead letter"), { ids }, again), { kind: "main" }),
        button(`Discard ${count(ids.length)}`, () => discard(plural(ids.length, "dead letter"), { ids }, again))]
        : state && some && [button("Send all of these again", () => replay("all that match", matching, again)),
          button("Discard all of these", () => discard("all that match", matching, again))]);
  }

  async function counts() {
    const told = await get("/v1/dead-letters/counts", chosen(values));
    show(counted, Object.entries(told.total).filter(([, n]) => n).map(([state, n], i) => [i ? " · " : "", `${count(n)} ${state.replaceAll("_", " ")}`]),
      Object.values(told.total).some(Boolean) ? "" : "none");
  }

  show(place, h("h1", null, "Dead letters"), counted,
    filters([["endpoint", "Endpoint"], ["type", "Type"], ["reason", "Reason", REASONS], ["state", "State", STATES], ["since", "Since"], ["until", "Until"],
      ...(session.tenant === null ? [["tenant", "Tenant"]] : [])], values, go),
    bar, list.place, running);
  paint();
  list.load().catch((error) => show(list.place, h("p", { class: "bad" }, error.message)));
  counts().catch(() => {});
  return live(async (signal) => {
    const told = await get("/v1/replays", { limit: 20 }, signal);
    show(running, told.items.length ? jobs(told.items, again) : null);
  }, pulse);
}

export function letter(place, [id]) {
  const look = async () => {
    const each = await get(`/v1/dead-letters/${encodeURIComponent(id)}`);
    const again = () => look().catch(pulse);
    show(place,
      h("h1", null, `Dead letter ${id} `, badge(each.state)),
      h("div", { class: "actions" },
        each.state === "dead" && button("Send again", () => replay(`dead letter ${id}`, { ids: [each.id] }, again), { kind: "main" }),
        each.state === "dead" && button("Discard", () => discard(`dead letter ${id}`, { ids: [each.id] }, again)),
        each.event && h("a", { class: "button", href: link("trace", [each.event]) }, "The event's life")),
      facts([
        ["Endpoint", h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint)],
        ["Lane, number", `${each.lane}, ${numbers(each)}`],
        ["Event", each.event ?? "a range of deliveries that were never sent"],
        ["Type", each.type], ["Key", each.key], ["Tenant", each.tenant],
        ["Reason", each.reason], ["Status", each.status], ["Attempts", count(each.attempts)], ["When", time(each.at)],
      ]),
      h("section", null, h("h2", null, "All that is known"), code(each)));
    pulse(null);
  };
  show(place, h("h1", null, `Dead letter ${id}`));
  look().catch((error) => { show(place, h("h1", null, `Dead letter ${id}`), h("p", { class: "bad" }, error.message)); });
}
