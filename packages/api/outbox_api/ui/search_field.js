// One field for several filters: each is a chip before the text that is typed.

import { session } from "./api.js";
import { chip } from "./components.js";
import { h } from "./dom.js";

const TOKEN = /([a-z]+):("[^"]*"|\S+)|"[^"]*"|\S+/gi;
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

const unquoted = (text) => text.replace(/^"(.*)"$/s, "$1");

// Filters that lists have.  Another word before a colon belongs to a value, such as a key "order:7".
const KNOWN = ["endpoint", "tenant", "status", "outcome", "type", "key", "event", "since", "until", "state", "reason", "condition", "search", "kind", "actor", "by", "scope", "revoked", "lane"];

// The filters that a text names, `status:5xx failed order-7`; `bare` is what words without a name are, unless they are an event's id.
function parseFilters(text, { names, flags, words, bare }) {
  const values = {};
  for (const [word, name, value] of text.matchAll(TOKEN)) {
    if (name && names.includes(name.toLowerCase())) values[name.toLowerCase()] = unquoted(value);
    else if (name && KNOWN.includes(name.toLowerCase())) throw new Error(`There is no filter “${name}” here, but ${[...names, ...flags].join(", ")}.`);
    else if (words[word.toLowerCase()]) Object.assign(values, words[word.toLowerCase()]);
    else if (flags.includes(word.toLowerCase())) values[word.toLowerCase()] = "true";
    else if (UUID.test(word) && names.includes("event")) values.event = word;
    else values[bare] = [values[bare], unquoted(word)].filter(Boolean).join(" ");
  }
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value));
}

// `values` are the filters that are set; `onChange` gets others.  `examples` are offered while typing.  Only system tokens name a tenant.
export function searchField({ names: all, flags = [], words = {}, bare, values, examples = [], placeholder, onChange }) {
  const names = all.filter((each) => each !== "tenant" || session.tenant === null);
  const without = (name) => Object.fromEntries(Object.entries(values).filter(([each]) => each !== name));
  const set = [...names, ...flags].filter((name) => values[name]);
  const text = (name) => (flags.includes(name) ? name : `${name}:${values[name]}`);
  const input = h("input", {
    name: "filters", list: "filter-examples", autocomplete: "off", spellcheck: "false", "aria-label": "Filters",
    placeholder: set.length ? "" : placeholder,
    oninput: () => input.setCustomValidity(""),
    onkeydown: (event) => {
      // In an empty field it removes the last chip, as it removes letters, but not while it is held down.
      if (event.key !== "Backspace" || event.repeat || input.value || !set.length) return;
      event.preventDefault();
      onChange(without(set.at(-1)));
    },
  });
  return h("form", {
    class: "search find", role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      if (!input.value.trim()) return;
      try {
        onChange({ ...values, ...parseFilters(input.value, { names, flags, words, bare }) });
      } catch (error) {
        input.setCustomValidity(error.message);
        input.reportValidity();
      }
    },
  }, h("div", { class: "searched" },
    set.map((name) => chip(text(name), () => onChange(without(name)))), input),
  h("datalist", { id: "filter-examples" }, examples.map((each) => h("option", { value: each }))),
  h("button", { type: "submit" }, "Search"));
}
