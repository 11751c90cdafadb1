// Selection of rows in a listing: single rows, or all that match the filter.

import { session } from "./api.js";
import { h } from "./dom.js";
import { count, plural } from "./format.js";

// The last selection of each view: it survives refreshes, further pages, and a visit of an item.
const kept = new Map();

// The selection of a view with a filter; another filter, or another token, begins with an empty one.
export function selection(view, filter) {
  const key = JSON.stringify([session.me.name, Object.entries(filter).sort()]);
  if (kept.get(view)?.key !== key) kept.set(view, new Selection(key));
  return kept.get(view);
}

class Selection {
  constructor(key) {
    this.key = key;
    this.clear();
  }

  clear() {
    this.single = new Set();
    // Whether all that match the filter are selected, with the pages that are not loaded.
    this.matching = false;
  }

  has(id) { return this.matching || this.single.has(id); }

  get isEmpty() { return !this.matching && !this.single.size; }

  // Select or deselect rows; without one of them, "all that match" becomes all others of `shown`.
  set(ids, selected, shown) {
    if (this.matching) this.single = new Set(shown);
    this.matching = false;
    for (const id of ids) {
      if (selected) this.single.add(id);
      else this.single.delete(id);
    }
  }

  selectMatching() {
    this.clear();
    this.matching = true;
  }

  // Forget rows that are not selectable any more.
  remove(ids) { for (const id of ids) this.single.delete(id); }
}

export const rowBox = (selected, id, label, shown, repaint) => h("input", { type: "checkbox", "aria-label": label, checked: selected.has(id),
  onchange: (event) => { selected.set([id], event.target.checked, shown); repaint(); } });

// The bar above a listing: how many rows are selected, and the `buttons` for `n` of them.
//   shown: ids of the selectable rows on this page;  total: number of rows that match the filter;
//   subject: singular and plural;  filtered: whether a filter is set.
export function selectionBar(selected, { shown, total, subject, filtered, repaint, buttons }) {
  if (!shown.length && selected.isEmpty) return null;
  const onPage = shown.filter((id) => selected.has(id)).length;
  const all = shown.length > 0 && onPage === shown.length;
  const n = selected.matching ? total : selected.single.size;
  const box = h("input", { type: "checkbox", checked: all, onchange: (event) => {
    if (!event.target.checked && selected.matching) selected.clear();
    else selected.set(shown, event.target.checked, shown);
    repaint();
  } });
  box.indeterminate = onPage > 0 && !all;
  const text = selected.matching ? `All ${plural(total, ...subject)}${filtered ? " that match the filter" : ""} are selected.`
    : !n ? "" : n > onPage ? `${count(n)} selected, ${count(n - onPage)} of them not on this page.`
      : all && total > n ? `All ${count(n)} on this page are selected.` : `${count(n)} selected.`;
  const more = !selected.matching && all && total > n && h("button", { type: "button", class: "link", onclick: () => { selected.selectMatching(); repaint(); } },
    `Select all ${count(total)}${filtered ? " that match the filter" : ` ${subject[1]}`}`);
  const clear = (event) => {
    const bar = event.target.closest(".selection");
    selected.clear();
    repaint();
    // This button is gone, so the focus moves to the box before it.
    bar.querySelector("input")?.focus();
  };
  return [
    shown.length > 0 && h("label", { class: "pick" }, box, `Select all ${count(shown.length)} on this page`),
    h("span", { role: "status" }, text),
    more,
    n > 0 && h("button", { type: "button", class: "link", onclick: clear }, "Clear selection"),
    n > 0 && h("span", { class: "actions" }, buttons(n)),
  ];
}
