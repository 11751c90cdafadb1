// Listings that go on at their end, and their filters.

import { h, show } from "./dom.js";
import { attempt, field } from "./talk.js";

// `read(after)` gives {items, next}.
export function pages(read, draw) {
  const place = h("div", { class: "pages" });
  let items = [];
  let next = null;
  let last = {};
  async function more(before, after, least) {
    let found = before;
    do {
      last = await read(after);
      after = last.next;
      found = found.concat(last.items);
    } while (after !== null && found.length < least);
    items = found;
    next = after;
    paint();
  }
  function paint() {
    show(place, draw(items, last), h("p", { class: "more" },
      next !== null && h("button", { type: "button", onclick: (event) => {
        // Twice would be the same page twice.
        event.target.disabled = true;
        attempt(() => more(items, next, 0)).finally(() => { event.target.disabled = false; });
      } }, "More")));
  }
  // What was read before is read anew, however many pages that were.
  return { place, load: () => more([], null, items.length), repaint: paint };
}

const TIMES = ["since", "until"];

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
      placeholder: TIMES.includes(id) ? "2h" : null,
      title: TIMES.includes(id) ? "So long ago, such as 2h or 3d, or a moment, such as 2026-01-31T12:00Z" : null }))),
    h("div", { class: "actions" }, h("button", { type: "submit", class: "main" }, "Find"),
      Object.keys(values).length ? h("button", { type: "button", onclick: () => go({}) }, "Clear") : null));
  return form;
}
