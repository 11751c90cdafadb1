// A table of any height: only the rows near the window are elements, and the columns do not depend on them.

import { columnHead, row } from "./components.js";
import { h } from "./dom.js";

// So many rows are drawn above and below the window, and are elements whatever the height.
const MARGIN = 24;
const SLACK = 8;

// `columns` are [head, width] pairs; a head that begins with "#" is a number's.  `cells` draws the cells of an item.
// Sizes are attributes: the page's policy allows no style that is set as a text.
export function tallTable(columns, { keyOf, cells, repaint }) {
  const heads = columns.map(([head]) => head);
  const place = h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Table" });
  let rowHeight = 38;
  let total = 0;
  let drawn = [0, 0];
  let waiting = false;

  // The rows in the window: their numbers, from and to.
  function visible() {
    const body = place.querySelector("tbody");
    const top = body ? body.getBoundingClientRect().top : 0;
    return [Math.floor(-top / rowHeight), Math.ceil((innerHeight - top) / rowHeight)].map((n) => Math.min(Math.max(n, 0), total));
  }
  function onScroll() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const [from, to] = visible();
      const isNear = (from >= drawn[0] + SLACK || drawn[0] === 0) && (to <= drawn[1] - SLACK || drawn[1] === total);
      if (!isNear) repaint();
    });
  }
  const space = (rows, key) => rows > 0 && h("tr", { class: "space", "data-key": key, "aria-hidden": "true" }, h("td", { colspan: heads.length, height: Math.round(rows * rowHeight) }));

  function line(each, n) {
    const drawnRow = row(cells(each), heads, keyOf(each));
    drawnRow.setAttribute("aria-rowindex", drawn[0] + n + 2);
    return drawnRow;
  }

  function draw(items) {
    const rows = [...place.querySelectorAll("tbody tr:not(.space)")];
    const measured = rows.length && (rows.at(-1).getBoundingClientRect().bottom - rows[0].getBoundingClientRect().top) / rows.length;
    // A fraction of a pixel, times a thousand rows, would move what is shown.
    if (measured && Math.abs(measured - rowHeight) > 0.5) rowHeight = measured;
    total = items.length;
    const [from, to] = visible();
    drawn = [Math.max(from - MARGIN, 0), Math.min(to + MARGIN, total)];
    return h("table", { "aria-rowcount": total + 1 },
      h("colgroup", null, columns.map(([, width]) => h("col", { width }))),
      h("thead", null, h("tr", null, heads.map(columnHead))),
      h("tbody", null, space(drawn[0], "\nabove"), items.slice(...drawn).map(line), space(total - drawn[1], "\nbelow")));
  }
  return { place, draw, onScroll };
}
