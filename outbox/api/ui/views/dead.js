// Dead letters: find them, choose some, and see how those fare that are sent again.

import { discard, replay } from "../again.js";
import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import * as jobs from "../jobs.js";
import { filters, pages } from "../listing.js";
import { live, permanent } from "../live.js";
import { badge, button, row, table, when } from "../parts.js";
import { link } from "../places.js";
import { count, plural, sentence } from "../say.js";

const HEADS = ["", "Id", "Endpoint", "#Number", "Type", "Reason", "Status", "#Attempts", "When", "State"];
const STATES = [["dead", "dead"], ["replaying", "replaying"], ["replayed", "replayed"], ["dead_again", "dead again"], ["discarded", "discarded"], ["all", "all"]];
const REASONS = ["", "refused", "exhausted", "expired", "erased", "backlog", "disabled", "removed"].map((each) => [each, each || "any"]);

export const numbers = (each) => (each.sequence === each.to_sequence ? String(each.sequence) : `${each.sequence}–${each.to_sequence}`);

function chosen(values) {
  const { state, ...rest } = values;
  return rest;
}

export function view(place, _, values) {
  const picked = new Set();
  let shown = [];
  const counted = h("p", { class: "hint" });
  const running = h("div");
  const bar = h("div", { class: "actions sticky" });
  const mayPick = (each) => each.state === "dead" && session.may("operate");
  const list = pages((after) => get("/v1/dead-letters", { ...values, limit: 50, after }), draw);

  function draw(items) {
    shown = items;
    bars();
    return table(HEADS, items.map((each) => row([
      mayPick(each) && h("input", { type: "checkbox", "aria-label": `Choose dead letter ${each.id}`, checked: picked.has(each.id),
        onchange: (event) => { if (event.target.checked) picked.add(each.id); else picked.delete(each.id); bars(); } }),
      h("a", { href: link("letter", [String(each.id)]) }, String(each.id)),
      h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint),
      numbers(each),
      each.type ?? "a range",
      each.reason,
      each.status === null ? "–" : String(each.status),
      count(each.attempts),
      when(each.at),
      badge(each.state),
    ], HEADS, each.id)), values.state && values.state !== "dead" ? "There is none like this."
      : Object.keys(chosen(values)).length ? "There is no dead letter like this: everything else arrived, or is on its way."
        : "There is no dead letter: everything arrived, or is on its way.");
  }

  // What can be done with those that are chosen, or with all.
  function bars() {
    const free = shown.filter(mayPick);
    const ids = [...picked];
    const every = free.length > 0 && free.every((each) => picked.has(each.id));
    const matching = Object.keys(chosen(values)).length ? { ...chosen(values), type: values.type ? [values.type] : undefined } : { all: true };
    const letters = ids.length ? shown.filter((each) => picked.has(each.id)) : free;
    show(bar, free.length ? [
      h("label", { class: "pick" }, h("input", { type: "checkbox", checked: every, onchange: (event) => {
        free.forEach((each) => (event.target.checked ? picked.add(each.id) : picked.delete(each.id)));
        list.repaint();
      } }), `Select all ${count(free.length)} shown`),
      ids.length ? [button(`Send ${count(ids.length)} again`, () => replay(plural(ids.length, "dead letter"), { ids }, letters), { kind: "main" }),
        button(`Discard ${count(ids.length)}`, () => discard(plural(ids.length, "dead letter"), { ids }, letters))]
        : [button("Send all of these again", () => replay("all that match", matching, letters)),
          button("Discard all of these", () => discard("all that match", matching, letters))]] : null);
  }

  async function counts() {
    const told = await get("/v1/dead-letters/counts", chosen(values));
    const some = Object.entries(told.total).filter(([, n]) => n);
    show(counted, some.length ? some.map(([state, n], i) => [i ? " · " : "", `${count(n)} ${state.replaceAll("_", " ")}`]) : "none");
  }

  async function load() {
    try {
      await Promise.all([list.load(), counts()]);
    } catch (error) {
      if (!permanent(error)) throw error;
      show(list.place, h("p", { class: "bad" }, sentence(error.message)));
    }
  }

  show(place, h("h1", null, "Dead letters"), counted,
    filters([["endpoint", "Endpoint"], ["type", "Type"], ["reason", "Reason", REASONS], ["state", "State", STATES], ["since", "Since"], ["until", "Until"],
      ...(session.tenant === null ? [["tenant", "Tenant"]] : [])], values, (next) => { location.hash = link("dead", [], next); }),
    bar, list.place, running);

  let loaded = false;
  let fared = "";
  return live(place, async (signal, acted) => {
    if (acted) {
      picked.clear();
      loaded = false;
    }
    if (!loaded) await load();
    loaded = true;
    const told = await jobs.look(signal);
    show(running, jobs.draw(told));
    const fares = told.all.map((job) => `${job.id} ${job.state} ${job.done}`).join();
    if (fared !== fares && fared) await counts();
    fared = fares;
  });
}
