// Journal: changes and state transitions, newest first.

import { get, session } from "../api.js";
import { h, show } from "../dom.js";
import { code, row, table } from "../components.js";
import { time } from "../format.js";
import { filters, follow, pages } from "../listing.js";
import { link } from "../router.js";

const HEADS = ["When", "Change", "Endpoint", "By", "Details"];
const DETAIL_CHARS_MAX = 120;

const plain = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value));

function details(data) {
  const found = Object.entries(data).filter(([, value]) => value !== null && value !== "");
  if (!found.length) return "";
  const line = found.map(([name, value]) => `${name.replaceAll("_", " ")} ${plain(value)}`).join(", ");
  return h("details", null, h("summary", null, line.length > DETAIL_CHARS_MAX ? `${line.slice(0, DETAIL_CHARS_MAX)}…` : line), code(data));
}

export function view(place, _, values) {
  const list = pages((after, signal) => get("/v1/journal", { ...values, limit: 100, after }, signal), (items) => table(HEADS, items.map((each) => row([
    h("time", { datetime: each.at }, time(each.at)), 
    h("a", { href: link("journal", [], { ...values, kind: each.kind }), title: "Entries of this kind only" }, each.kind.replaceAll("_", " ")),
    each.endpoint ? h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint) : "–",
    each.session_role && each.session_role !== each.actor ? h("span", { title: `Database role ${each.session_role}` }, each.actor) : each.actor,
    details(each.data),
  ], HEADS, each.id)), Object.keys(values).length ? "No entries match the filter." : "No entries."));
  show(place, h("h1", null, "Journal"),
    h("p", { class: "hint" }, session.tenant === null ? "Every change, with the token, user or relay that made it." : "Changes of your endpoints."),
    filters([["endpoint", "Endpoint"], ["kind", "Change"], ["actor", "By"], ["since", "Since"], ["until", "Until"]], values, (next) => { location.hash = link("journal", [], next); }), list.place);
  return follow(place, list);
}
