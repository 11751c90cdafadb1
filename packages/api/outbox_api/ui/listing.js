// Paginated listings and their filters.

import { get } from "./api.js";
import { chip } from "./components.js";
import { h, show } from "./dom.js";
import { field, tryRequest } from "./dialogs.js";
import { sentence } from "./format.js";
import { live, permanent } from "./live.js";

// `read(after, signal)` returns one page {items, next} of the API; `draw` renders all items read so far.
export function pages(read, draw) {
  const place = h("div", { class: "pages" });
  let items = [];
  let next = null;
  let last = {};
  let paged = false;
  let readsMore = false;
  // What a refresh has read is discarded if another read has begun meanwhile.
  let reads = 0;
  async function readPages(before, after, countMin, signal) {
    reads += 1;
    const own = reads;
    let all = before;
    let page;
    do {
      page = await read(after, signal);
      after = page.next;
      all = all.concat(page.items);
    } while (after !== null && all.length < countMin);
    if (own !== reads) return;
    items = all;
    next = after;
    last = page;
    paint();
  }
  async function readMore(event) {
    // A second click would read the same page again.
    event.target.disabled = true;
    readsMore = true;
    await tryRequest(async () => {
      await readPages(items, next, 0);
      paged = true;
    });
    readsMore = false;
    event.target.disabled = false;
  }
  function paint() {
    show(place, draw(items, last), h("p", { class: "more" },
      next !== null && h("button", { type: "button", onclick: readMore }, "Load more")));
  }
  // Reads as many items again as were shown before.  Returns false for an invalid filter, which is
  // explained in their place.
  async function load(signal) {
    if (readsMore) return true;
    try {
      await readPages([], null, items.length, signal);
      return true;
    } catch (error) {
      if (!permanent(error) || error.status === 403) throw error;
      show(place, h("p", { class: "bad" }, sentence(error.message)));
      return false;
    }
  }
  return { place, load, repaint: paint, isPaged: () => paged };
}

const REFRESH_MS = 5000;

// Keep a listing current until older pages are read: new rows would move what is being read.  A costly
// one is read once.  Returns a function that stops it.
export function follow(place, list, { costly = false } = {}) {
  let complete = false;
  return live(place, async (signal) => {
    if (complete || list.isPaged()) await get("/v1/me", {}, signal);
    else complete = !await list.load(signal) || costly;
  }, { every: REFRESH_MS });
}

const TIMES = { since: "e.g. 2h", until: "now" };

// One chip per filter that is set; a click removes it.
function chips(fields, values, onChange) {
  const set = fields.filter(([id]) => values[id]);
  return set.length ? h("p", { class: "chips" }, set.map(([id, label, options]) => {
    const text = options?.find(([value]) => value === values[id])?.[1] ?? values[id];
    const { [id]: _, ...rest } = values;
    return chip(`${label}: ${text}`, () => onChange(rest));
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
