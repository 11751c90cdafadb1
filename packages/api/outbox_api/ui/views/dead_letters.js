// Dead letters: filter, select, replay or discard; replay jobs below.

import { discard, replay } from "../dead_letter_actions.js";
import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import * as jobs from "../jobs.js";
import { pages } from "../listing.js";
import { live, occasionally, permanent } from "../live.js";
import { searchField } from "../search_field.js";
import { rowBox, selection, selectionBar } from "../selection.js";
import { badge, button, oneLine, responseLine, row, table, when } from "../components.js";
import { link } from "../router.js";
import { count, plural } from "../format.js";

const HEADS = ["", "Id", "Endpoint", "Type", "Key", "Reason", "Last response", "#Attempts", "When", "State"];
const STATES = ["dead", "replaying", "replayed", "dead_again", "discarded", "all"];
const REASONS = ["refused", "exhausted", "expired", "erased", "missing", "skipped", "backlog", "adopted", "disabled", "removed"];

export const sequenceRange = (each) => (each.sequence === each.to_sequence ? String(each.sequence) : `${each.sequence}–${each.to_sequence}`);

const lastResponse = (each) => responseLine({ status: each.status ?? undefined, failure: each.failure ?? undefined, detail: each.excerpt ?? "" }) ?? "–";

// A new dead letter is shown after this time at the latest.
const COUNTS_EVERY_MS = 10_000;

// The API's limit of ids in a request.
const IDS_MAX = 1000;

function withoutState(values) {
  const { state, ...rest } = values;
  return rest;
}

export function view(place, _, values) {
  const filter = withoutState(values);
  const filtered = Object.keys(filter).length > 0;
  const selected = selection("dead-letters", values);
  let shown = [];
  let total = 0;
  let counted = "";
  const summary = h("p", { class: "hint" });
  const jobsPlace = h("div");
  const runningPlace = h("div");
  const bar = h("div", { class: "selection", role: "group", "aria-label": "Selection" });
  const isSelectable = (each) => each.state === "dead" && session.may("operate");
  const list = pages((after, signal) => get("/v1/dead-letters", { ...values, limit: 50, after }, signal), draw);

  function draw(items) {
    shown = items;
    selected.remove(items.filter((each) => !isSelectable(each)).map((each) => each.id));
    const selectable = items.filter(isSelectable).map((each) => each.id);
    drawActions();
    return table(HEADS, items.map((each) => row([
      isSelectable(each) && rowBox(selected, each.id, `Select dead letter ${each.id}`, selectable, list.repaint),
      h("a", { href: link("dead-letter", [String(each.id)]) }, String(each.id)),
      h("a", { href: link("endpoint", [each.endpoint]) }, oneLine(each.endpoint)),
      oneLine(each.type ?? `a range: ${sequenceRange(each)}`),
      each.key === null ? "–" : h("a", { href: link("events", [], { key: each.key }) }, oneLine(each.key)),
      each.reason,
      oneLine(lastResponse(each)),
      count(each.attempts),
      when(each.at),
      badge(each.state),
    ], HEADS, each.id)), filtered || (values.state && values.state !== "dead") ? "No dead letters match the filter." : "No dead letters: deliveries that will not be attempted again are kept here until somebody replays or discards them.");
  }

  // Actions on the selected dead letters, or on all that match the filter.
  function drawActions() {
    const selectable = shown.filter(isSelectable);
    const matching = filtered ? { ...filter, type: filter.type ? [filter.type] : undefined } : { all: true };
    async function act(action, n) {
      const body = selected.matching ? matching : { ids: [...selected.single] };
      const text = selected.matching && filtered ? `${plural(n, "dead letter")} that ${n === 1 ? "matches" : "match"} the filter` : plural(n, "dead letter");
      if (!await action(text, body, selectable.filter((each) => selected.has(each.id)))) return;
      selected.clear();
      list.repaint();
    }
    show(bar, selectionBar(selected, { shown: selectable.map((each) => each.id), total, subject: ["dead letter", "dead letters"], filtered,
      repaint: list.repaint, buttons: (n) => (n > IDS_MAX && !selected.matching ? h("span", { class: "hint" }, `At most ${count(IDS_MAX)} at a time, or all that match.`)
        : [button(`Replay ${count(n)}`, () => act(replay, n), { kind: "main" }), button(`Discard ${count(n)}`, () => act(discard, n))]) }));
  }

  // Returns whether the counts have changed since they were drawn before.
  async function drawCounts() {
    // The listing explains an invalid filter.
    const counts = await get("/v1/dead-letters/counts", filter).catch((error) => { if (!permanent(error)) throw error; });
    if (!counts) return false;
    const states = Object.entries(counts.total).filter(([, n]) => n);
    const text = JSON.stringify(states);
    const changed = text !== counted;
    counted = text;
    total = counts.total.dead;
    drawActions();
    show(summary, states.length ? states.map(([state, n], i) => [i ? " · " : "", `${count(n)} ${state.replaceAll("_", " ")}`]) : "none");
    return changed;
  }

  show(place, h("h1", null, "Dead letters"), summary,
    searchField({ names: ["endpoint", "type", "reason", "state", "tenant", "since", "until"], bare: "endpoint",
      values, examples: [...STATES.map((each) => `state:${each}`), ...REASONS.map((each) => `reason:${each}`)], placeholder: "an endpoint; or reason:exhausted, state:all, since:1d …",
      onChange: (next) => { location.hash = link("dead-letters", [], next); } }),
    runningPlace, bar, list.place, jobsPlace);

  let loaded = false;
  let lastProgress = "";
  const readCounts = occasionally(COUNTS_EVERY_MS, async (signal) => {
    if (await drawCounts()) await list.load(signal);
  });
  return live(place, async (signal, acted) => {
    if (acted) loaded = false;
    if (!loaded) await Promise.all([list.load(signal), drawCounts()]);
    else await readCounts(signal, acted);
    loaded = true;
    const running = await jobs.load(signal);
    // What runs is above the list, where its link leads.
    const runs = running.all.some((job) => job.state === "running");
    show(runningPlace, runs ? jobs.draw(running) : null);
    show(jobsPlace, runs ? null : jobs.draw(running));
    const progress = running.all.map((job) => `${job.id} ${job.state} ${job.done}`).join();
    if (lastProgress !== progress && lastProgress && await drawCounts()) await list.load(signal);
    lastProgress = progress;
  });
}
