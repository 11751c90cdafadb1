// Paginated listings.

import { get } from "./api.js";
import { h, show } from "./dom.js";
import { tryRequest } from "./dialogs.js";
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
      // A page without items has searched, and found nothing: a refresh does not search all.
    } while (after !== null && all.length < countMin && page.items.length);
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
