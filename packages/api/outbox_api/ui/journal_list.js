// The journal's entries, newest first.

import { get } from "./api.js";
import { h } from "./dom.js";
import { code, responseLine, row, table } from "./components.js";
import { time } from "./format.js";
import { pages } from "./listing.js";
import { link } from "./router.js";

const HEADS = ["When", "Change", "Endpoint", "By", "Details"];
const DETAIL_CHARS_MAX = 120;

function plain(name, value) {
  if (name === "last_response") return responseLine(value) ?? "none";
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

function details(data) {
  const found = Object.entries(data).filter(([, value]) => value !== null && value !== "");
  if (!found.length) return "";
  const line = found.map(([name, value]) => `${name.replaceAll("_", " ")} ${plain(name, value)}`).join(", ");
  return h("details", null, h("summary", null, line.length > DETAIL_CHARS_MAX ? `${line.slice(0, DETAIL_CHARS_MAX)}…` : line), code(data));
}

function emptyText({ endpoint, by, ...filters }, next) {
  if (next !== null) return "None among the entries that were searched. “Load more” continues.";
  if (Object.keys(filters).length) return "No entries match the filter.";
  return by ? "No entries." : "No changes by people.";
}

// `values` are the filters of GET /v1/journal; without `by`, what people changed.
export function journalList(values) {
  const heads = values.endpoint ? HEADS.filter((each) => each !== "Endpoint") : HEADS;
  return pages((after, signal) => get("/v1/journal", { by: "people", ...values, limit: 100, after }, signal), (items, { next }) => table(heads, items.map((each) => row([
    h("time", { datetime: each.at }, time(each.at)),
    h("a", { href: link("journal", [], { ...values, kind: each.kind }), title: "Entries of this kind only" }, each.kind.replaceAll("_", " ")),
    !values.endpoint && (each.endpoint ? h("a", { href: link("endpoint", [each.endpoint]) }, each.endpoint) : "–"),
    each.session_role && each.session_role !== each.actor ? h("span", { title: `Database role ${each.session_role}` }, each.actor) : each.actor,
    details(each.data),
  ].filter((cell) => cell !== false), heads, each.id)), emptyText(values, next)));
}
