// What several views are made of: states, tables, times.

import { session } from "./api.js";
import { h } from "./dom.js";
import { ago, time } from "./say.js";

// The words for how something is, from best to worst.
const TONE = {
  healthy: "good", delivered: "good", replayed: "good", active: "good", alive: "good", ok: "good", done: "good",
  recovering: "fair", owed: "fair", replaying: "fair", running: "fair", waiting: "fair", held: "fair",
  paused: "off", disabled: "off", discarded: "off", lapsed: "off", expired: "off", aborted: "off", free: "off",
  failing: "bad", refusing: "bad", dead: "bad", dead_again: "bad", blocked: "bad", problem: "bad", warning: "fair",
  disabling: "off", removing: "off", given_up: "bad",
};

export const toneOf = (word) => TONE[word] ?? "fair";

export function badge(word, title) {
  return h("span", { class: `badge ${toneOf(word)}`, title }, String(word).replaceAll("_", " "));
}

// Who runs this outbox, and can run its commands: hints that name them are for nobody else.
export const operator = () => session.tenant === null && session.may("operate");

export function table(heads, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    h("table", null,
      h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col", class: head.startsWith("#") ? "number" : null },
        head.replace(/^#/, ""))))),
      h("tbody", null, rows)));
}

export const row = (cells, heads, key) => h("tr", { "data-key": key }, cells.map((cell, n) => h("td", {
  class: heads?.[n]?.startsWith("#") ? "number" : null, "data-head": heads?.[n]?.replace(/^#/, ""),
}, cell)));

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([term, value]) => h("div", null,
    h("dt", null, term), h("dd", null, value ?? "–"))));
}

export const code = (value) => h("pre", { tabindex: "0" },
  typeof value === "string" ? value : JSON.stringify(value, null, 2));

// How long ago, and on a closer look when exactly.
export const when = (at) => (at ? h("time", { datetime: at, title: time(at) }, ago(at, session.now())) : "never");

export function button(text, onclick, { kind = "", scope = "operate", title } = {}) {
  const may = scope === null || session.may(scope);
  return may && h("button", { type: "button", class: kind, onclick, title }, text);
}

// What somebody answered, in a line: "400: user name too long".
export function answerLine(answer) {
  if (!answer) return null;
  const said = (answer.detail ?? answer.body ?? "").trim().split("\n")[0].slice(0, 200);
  return [answer.status ?? answer.failure?.replaceAll("_", " "), said].filter(Boolean).join(": ") || null;
}
