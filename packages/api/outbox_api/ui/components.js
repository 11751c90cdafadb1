// Shared components: badges, tables, times, buttons.

import { session } from "./api.js";
import { copyFrom } from "./clipboard.js";
import { h, svg } from "./dom.js";
import { ago, count, plural, time } from "./format.js";
import { readable } from "./json.js";

// Badge colour of each state.
const TONE = {
  healthy: "good", delivered: "good", replayed: "good", active: "good", live: "good", alive: "good", ok: "good", done: "good",
  degraded: "fair", recovering: "fair", pending: "fair", replaying: "fair", running: "fair", waiting: "fair", held: "fair",
  paused: "off", disabled: "off", discarded: "off", lapsed: "off", expired: "off", aborted: "off", revoked: "off", free: "off",
  failing: "bad", rejecting: "bad", dead: "bad", dead_again: "bad", blocked: "bad", problem: "bad", warning: "fair",
  retry: "fair", probe: "fair", retrying: "bad", refused: "bad", disabling: "off", removing: "off", dead_lettered: "bad",
};

export const badgeTone = (word) => TONE[word] ?? "fair";

export function badge(word, title, more = "") {
  return h("span", { class: `badge ${badgeTone(word)}`, title }, String(word).replaceAll("_", " ") + more);
}

// The condition of an endpoint; `lanes` is their number.
export function condition(each, lanes, title) {
  const failing = each.condition === "degraded" ? ` (${each.failing_lanes} of ${Math.max(lanes, each.failing_lanes)} lanes)` : "";
  return badge(each.condition, title, failing);
}

// Only operators can run commands: hints that name a command are for them.
export const isOperator = () => session.tenant === null && session.may("operate");

export const columnHead = (head) => h("th", { scope: "col", class: head.startsWith("#") ? "number" : null, "data-head": head.replace(/^#/, "") }, head.replace(/^#/, ""));

export function table(heads, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", null,
      h("thead", null, h("tr", null, heads.map(columnHead))),
      h("tbody", null, rows)));
}

export const row = (cells, heads, key) => h("tr", { "data-key": key }, cells.map((cell, n) => h("td", {
  class: [heads?.[n]?.startsWith("#") && "number", cell === "–" && "none"].filter(Boolean).join(" ") || null, "data-head": heads?.[n]?.replace(/^#/, ""),
}, cell)));

export function definitionList(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([term, value]) => h("div", null,
    h("dt", null, term), h("dd", null, value ?? "–"))));
}

export const code = (value) => h("pre", { tabindex: "0" }, readable(value));

// Relative time, with the absolute time as its tooltip.
export const when = (at) => (at ? h("time", { datetime: at, title: time(at) }, ago(at, session.now())) : "never");

// A text on one line, which is whole in its tooltip.
export const oneLine = (text, more = "") => h("span", { class: `cut ${more}`.trim(), title: text }, text);

const copyIcon = () => svg("svg", { class: "icon", viewBox: "0 0 16 16", width: 13, height: 13, "aria-hidden": "true" },
  svg("rect", { x: 5.5, y: 5.5, width: 8, height: 9, rx: 1.5 }), svg("path", { d: "M3.5 10.5h-1v-9h8v1" }));

// Title of a view, with what can be done beside it.
export const heading = (title, ...actions) => h("header", { class: "head" }, h("h1", null, title), h("div", { class: "actions" }, actions));

// The first characters of an id, which is whole in its tooltip, and copied with a button beside it.
export const idLink = (id, href, onclick) => h("span", { class: "ident" },
  h("a", { class: "id", href, title: id, onclick }, h("code", null, `${id.slice(0, 8)}…`)),
  h("button", { type: "button", class: "copy", "aria-label": `Copy ${id}`, title: "Copy", onclick: (event) => copyFrom(event.currentTarget, id) }, copyIcon()));

// Arrow keys go from row to row of a list, in the same column, and from its empty search field to the first one.
export function moveByArrow(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.defaultPrevented) return;
  if (!event.target.matches?.("a, button, summary, input[type=checkbox], .find input")) return;
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const cell = step && event.target.closest("tbody td");
  const isFromField = event.key === "ArrowDown" && event.target.matches(".find input") && !event.target.value;
  const next = isFromField ? document.querySelector(".pages tbody a")
    : cell?.parentElement[step]?.children[cell.cellIndex]?.querySelector("a, button, input, summary");
  if (!next) return;
  event.preventDefault();
  next.focus();
}

// Further actions; the menu closes after a choice, a click elsewhere, or Esc.
export function menu(label, ...items) {
  return h("details", { class: "menu" }, h("summary", { class: "button" }, label), h("div", { class: "items" }, items));
}

export function closeMenus(event) {
  for (const each of document.querySelectorAll("details.menu[open]")) {
    if (event.type === "keydown" ? event.key !== "Escape" : each.querySelector("summary").contains(event.target)) continue;
    each.open = false;
    if (event.type === "keydown") each.querySelector("summary").focus();
  }
}

// A filter that is set; a click removes it.
export const chip = (text, onclick) => h("button", { type: "button", class: "chip", "aria-label": `Remove the filter ${text}`, onclick },
  `${text} `, h("span", { "aria-hidden": "true" }, "×"));

// Requests that were made for a delivery, and how many of them were only probes.
export const attemptCount = ({ attempts, probes }) => (probes ? `${count(attempts)} (${plural(probes, "probe")})` : count(attempts));

export function button(text, onclick, { kind = "", scope = "operate", title } = {}) {
  const may = scope === null || session.may(scope);
  return may && h("button", { type: "button", class: kind, onclick, title }, text);
}

// A response in one line: "400: user name too long".
export function responseLine(response) {
  if (!response) return null;
  const detail = (response.detail ?? response.body ?? "").trim().split("\n")[0].slice(0, 200);
  return [response.status ?? response.failure?.replaceAll("_", " "), detail].filter(Boolean).join(": ") || null;
}
