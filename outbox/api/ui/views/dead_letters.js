// Dead letters: filter, select, replay or discard; replay jobs below.

import { discard, replay } from "../dead_letter_actions.js";
import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import * as jobs from "../jobs.js";
import { filters, pages } from "../listing.js";
import { live, permanent } from "../live.js";
import { badge, button, responseLine, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, plural, sentence } from "../format.js";

const HEADS = ["", "Id", "Endpoint", "Type", "Key", "Reason", "Last response", "#Attempts", "When", "State"];
const STATES = [["dead", "dead"], ["replaying", "replaying"], ["replayed", "replayed"], ["dead_again", "dead again"], ["discarded", "discarded"], ["all", "all"]];
const REASONS = ["", "refused", "exhausted", "expired", "erased", "skipped", "backlog", "adopted", "disabled", "removed"].map((each) => [each, each || "any"]);

export const sequenceRange = (each) => (each.sequence === each.to_sequence ? String(each.sequence) : `${each.sequence}–${each.to_sequence}`);

const lastResponse = (each) => responseLine({ status: each.status ?? undefined, failure: each.failure ?? undefined, detail: each.excerpt ?? "" }) ?? "–";

function withoutState(values) {
  const { state, ...rest } = values;
  return rest;
}

export function view(place, _, values) {
  const selected = new Set();
  let shown = [];
  const summary = h("p", { class: "hint" });
  const jobsPlace = h("div");
  const actionBar = h("div", { class: "actions sticky" });
  const isSelectable = (each) => each.state === "dead" && session.may("operate");
  let hasMore = false;
  const list = pages((after) => get("/v1/dead-letters", { ...values, limit: 50, after }), draw);

  function draw(items, page) {
    shown = items;
    hasMore = page.next !== null;
    drawActions();
    return table(HEADS, items.map((each) => row([
      isSelectable(each) && h("input", { type: "checkbox", "aria-label": `Select dead letter ${each.id}`, checked: selected.has(each.id),
        onchange: (event) => { if (event.target.checked) selected.add(each.id); else selected.delete(each.id); drawActions(); } }),
      h("a", { href: link("dead-letter", [String(each.id)]) }, String(each.id)),
      h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint),
      each.type ?? `a range: ${sequenceRange(each)}`,
      each.key === null ? "–" : h("a", { href: link("events", [], { key: each.key }) }, each.key),
      each.reason,
      lastResponse(each),
      count(each.attempts),
      when(each.at),
      badge(each.state),
    ], HEADS, each.id)), values.state && values.state !== "dead" ? "No dead letters match the filter."
      : Object.keys(withoutState(values)).length ? "No dead letters match the filter."
        : "No dead letters.");
  }

  // Actions on the selected dead letters, or on all that match the filter.
  function drawActions() {
    const selectable = shown.filter(isSelectable);
    const ids = [...selected];
    const allSelected = selectable.length > 0 && selectable.every((each) => selected.has(each.id));
    const matching = Object.keys(withoutState(values)).length ? { ...withoutState(values), type: values.type ? [values.type] : undefined } : { all: true };
    const deadLetters = ids.length ? shown.filter((each) => selected.has(each.id)) : selectable;
    show(actionBar, selectable.length ? [
      h("label", { class: "pick" }, h("input", { type: "checkbox", checked: allSelected, onchange: (event) => {
        selectable.forEach((each) => (event.target.checked ? selected.add(each.id) : selected.delete(each.id)));
        list.repaint();
      } }), `Select all ${count(selectable.length)} shown`),
      ids.length > 0 && [button(`Replay ${count(ids.length)}`, () => replay(plural(ids.length, "dead letter"), { ids }, deadLetters), { kind: "main" }),
        button(`Discard ${count(ids.length)}`, () => discard(plural(ids.length, "dead letter"), { ids }, deadLetters))],
      // Those on the pages that are not loaded, too.
      (!ids.length || (allSelected && hasMore)) && [button("Replay all matching", () => replay("all matching dead letters", matching, deadLetters)),
        button("Discard all matching", () => discard("all matching dead letters", matching, deadLetters))],
      allSelected && hasMore && h("span", { class: "hint" }, "There are more pages: “all matching” includes them.")] : null);
  }

  async function drawCounts() {
    const { total } = await get("/v1/dead-letters/counts", withoutState(values));
    const states = Object.entries(total).filter(([, n]) => n);
    show(summary, states.length ? states.map(([state, n], i) => [i ? " · " : "", `${count(n)} ${state.replaceAll("_", " ")}`]) : "none");
  }

  async function load() {
    try {
      await Promise.all([list.load(), drawCounts()]);
    } catch (error) {
      if (!permanent(error)) throw error;
      show(list.place, h("p", { class: "bad" }, sentence(error.message)));
    }
  }

  show(place, h("h1", null, "Dead letters"), summary,
    filters([["endpoint", "Endpoint"], ["type", "Type"], ["reason", "Reason", REASONS], ["state", "State", STATES], ["since", "Since"], ["until", "Until"],
      ...(session.tenant === null ? [["tenant", "Tenant"]] : [])], values, (next) => { location.hash = link("dead-letters", [], next); }),
    actionBar, list.place, jobsPlace);

  let loaded = false;
  let lastProgress = "";
  return live(place, async (signal, acted) => {
    if (acted) {
      selected.clear();
      loaded = false;
    }
    if (!loaded) await load();
    loaded = true;
    const running = await jobs.load(signal);
    show(jobsPlace, jobs.draw(running));
    const progress = running.all.map((job) => `${job.id} ${job.state} ${job.done}`).join();
    if (lastProgress !== progress && lastProgress) await drawCounts();
    lastProgress = progress;
  });
}
