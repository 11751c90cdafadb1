// What several views are made of: tables, states, dialogs, pages that go on.

import { session } from "./api.js";
import { h, show } from "./dom.js";

// The words for how something is, from best to worst.
const TONE = {
  healthy: "good", delivered: "good", replayed: "good", active: "good", alive: "good", ok: "good", done: "good",
  recovering: "fair", owed: "fair", replaying: "fair", running: "fair", waiting: "fair", held: "fair",
  paused: "off", disabled: "off", discarded: "off", lapsed: "off", expired: "off", aborted: "off", free: "off",
  failing: "bad", refusing: "bad", dead: "bad", dead_again: "bad", blocked: "bad", problem: "bad", warning: "fair",
  disabling: "off", removing: "off", given_up: "bad",
};

export function badge(word, title) {
  return h("span", { class: `badge ${TONE[word] ?? "fair"}`, title }, String(word).replaceAll("_", " "));
}

// The operator's word, or the breaker's.
export const stateOf = (each) => (each.state === "active" ? each.health?.state ?? each.health ?? "active" : each.state);

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

export function button(text, onclick, { kind = "", scope = "operate", title } = {}) {
  const may = scope === null || session.may(scope);
  return may && h("button", { type: "button", class: kind, onclick, title }, text);
}

let noticeTimer = 0;

export function notice(text, kind = "good") {
  const place = document.getElementById("notice");
  show(place, text && h("p", { class: kind }, text,
    h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => notice("") }, "×")));
  clearTimeout(noticeTimer);
  if (text && kind === "good") noticeTimer = setTimeout(() => notice(""), 8000);
}

// A question; resolves with the form's values, or with null.
export function ask(title, body, { yes = "Do it", kind = "main", no = "Leave it" } = {}) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    const form = h("form", {
      method: "dialog",
      onsubmit: (event) => {
        event.preventDefault();
        dialog.close();
        resolve(Object.fromEntries(new FormData(form)));
      },
    }, h("h2", { id: "asked" }, title), body,
      h("div", { class: "actions" },
        no && h("button", { type: "button", onclick: () => dialog.close() }, no),
        h("button", { type: "submit", class: kind }, yes)));
    dialog.onclose = () => resolve(null);
    dialog.setAttribute("aria-labelledby", "asked");
    dialog.replaceChildren(form);
    dialog.showModal();
    (form.querySelector("input, select, textarea") ?? form.querySelector("[type=submit]")).focus();
  });
}

export const field = (label, control, hint) => h("label", { class: "field" },
  h("span", null, label), control, hint && h("small", null, hint));

export const why = (hint = "It stands in the journal.") => field("Why", h("input", { name: "why", maxlength: 200, autocomplete: "off" }), hint);

// Do something, and say what came of it.
export async function act(doing, done) {
  try {
    const told = await doing();
    notice(typeof done === "function" ? done(told) : done);
    return told;
  } catch (error) {
    notice(error.message, "bad");
    return undefined;
  }
}

// A listing that goes on at its end.  `read(after)` gives {items, next}.
export function pages(read, draw) {
  const place = h("div", { class: "pages" });
  let items = [];
  let next = null;
  async function more(fresh) {
    if (fresh) items = [];
    const page = await read(fresh ? null : next);
    items = items.concat(page.items);
    next = page.next;
    paint(page);
  }
  function paint(page) {
    show(place, draw(items, page), h("p", { class: "more" },
      next !== null && h("button", { type: "button", onclick: (event) => {
        // Twice would be the same page twice.
        event.target.disabled = true;
        act(() => more(false), "").finally(() => { event.target.disabled = false; });
      } }, "More")));
  }
  return { place, load: () => more(true), repaint: () => paint({}) };
}

// The filter of a listing, which stands in the address, so that it can be kept and shared.
export function filters(fields, values, go) {
  const form = h("form", {
    class: "filters", role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      go(Object.fromEntries([...new FormData(form)].filter(([, value]) => value.trim())));
    },
  }, fields.map(([id, label, options]) => field(label, options
    ? h("select", { name: id, onchange: () => form.requestSubmit() }, options.map(([value, text]) => h("option", {
      value, selected: (values[id] ?? options[0][0]) === value }, text)))
    : h("input", { name: id, value: values[id] ?? "", autocomplete: "off", spellcheck: "false",
      placeholder: id === "since" || id === "until" ? "2h, or 2026-01-31T12:00Z" : null }))),
    h("div", { class: "actions" }, h("button", { type: "submit", class: "main" }, "Find"),
      Object.keys(values).length ? h("button", { type: "button", onclick: () => go({}) }, "Clear") : null));
  return form;
}
