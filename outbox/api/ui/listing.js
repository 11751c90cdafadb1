// Paginated listings and their filters.

import { h, show } from "./dom.js";
import { get } from "./api.js";
import { field, tryRequest } from "./dialogs.js";
import { sentence } from "./format.js";
import { live, permanent } from "./live.js";

// `read(after)` returns one page {items, next} of the API; `draw` renders all items read so far.
export function pages(read, draw) {
  const place = h("div", { class: "pages" });
  let items = [];
  let next = null;
  let last = {};
  let paged = false;
  async function readPages(before, after, countMin) {
    let all = before;
    do {
      last = await read(after);
      after = last.next;
      all = all.concat(last.items);
    } while (after !== null && all.length < countMin);
    items = all;
    next = after;
    paint();
  }
  function paint() {
    show(place, draw(items, last), h("p", { class: "more" },
      next !== null && h("button", { type: "button", onclick: (event) => {
        // A second click would read the same page again.
        event.target.disabled = true;
        paged = true;
        tryRequest(() => readPages(items, next, 0)).finally(() => { event.target.disabled = false; });
      } }, "Load more")));
  }
  // Reads as many items again as were shown before.  An invalid filter is explained in their place.
  async function load() {
    try {
      await readPages([], null, items.length);
    } catch (error) {
      if (!permanent(error) || error.status === 403) throw error;
      show(place, h("p", { class: "bad" }, sentence(error.message)));
    }
  }
  return { place, load, repaint: paint, isPaged: () => paged };
}

const REFRESH_MS = 5000;

// Keep a listing current, until older pages are read: new rows would move what is being read.  A search
// over many rows, `isSearch()`, is not repeated either.  Returns a function that stops it.
export function follow(place, list, isSearch = () => false) {
  let loaded = false;
  return live(place, async (signal) => {
    if (loaded && (list.isPaged() || isSearch())) await get("/v1/me", {}, signal);
    else await list.load();
    loaded = true;
  }, { every: REFRESH_MS });
}

const TIMES = { since: "e.g. 2h", until: "now" };

// One chip per filter that is set; a click removes it.
function chips(fields, values, onChange) {
  const set = fields.filter(([id]) => values[id]);
  return set.length ? h("p", { class: "chips" }, set.map(([id, label, options]) => {
    const text = options?.find(([value]) => value === values[id])?.[1] ?? values[id];
    const { [id]: _, ...rest } = values;
    return h("button", { type: "button", class: "chip", "aria-label": `Remove the filter ${label}: ${text}`, onclick: () => onChange(rest) },
      `${label}: ${text} `, h("span", { "aria-hidden": "true" }, "×"));
  })) : null;
}

// Filter form of a listing.  `onChange` puts the values into the URL, so that it can be shared.
export function filters(fields, values, onChange) {
  const form = h("form", {
    class: "filters", role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      onChange(Object.fromEntries([...new FormData(form)].filter(([, value]) => value.trim())));
    },
  }, fields.map(([id, label, options]) => field(label, options
    ? h("select", { name: id, onchange: () => form.requestSubmit() }, options.map(([value, text]) => h("option", {
      value, selected: (values[id] ?? options[0][0]) === value }, text)))
    : h("input", { name: id, value: values[id] ?? "", autocomplete: "off", spellcheck: "false",
      placeholder: TIMES[id],
      title: TIMES[id] ? "An age such as 2h or 3d, or a time such as 2026-01-31T12:00Z" : null }))),
    h("div", { class: "actions" }, h("button", { type: "submit", class: "main" }, "Apply"),
      Object.keys(values).length ? h("button", { type: "button", onclick: () => onChange({}) }, "Clear") : null));
  return h("div", null, form, chips(fields, values, onChange));
}
