// Form controls for settings, made from their descriptions by the API.

import { field } from "./dialogs.js";
import { h } from "./dom.js";
import { capital } from "./format.js";

const LABELS = { url: "URL", ca: "CA certificates", compat: "Compat signature" };

export const labelOf = (name) => LABELS[name] ?? capital(name.replaceAll("_", " "));

const lines = (text) => text.split("\n").map((each) => each.trim()).filter(Boolean);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function textControl(attributes, toText, parse) {
  return (setting, value) => {
    const input = h("input", { type: "text", autocomplete: "off", spellcheck: "false", ...attributes(setting), value: toText(value) });
    return { element: input, read: () => (input.value.trim() === "" ? null : parse(input.value.trim())), write: (next) => { input.value = toText(next); } };
  };
}

function areaControl(rows, toText, parse) {
  return (setting, value) => {
    const area = h("textarea", { rows, spellcheck: "false", placeholder: setting.none }, toText(value));
    return { element: area, read: () => parse(area.value), write: (next) => { area.value = toText(next); } };
  };
}

const plain = (value) => (value === null || value === undefined ? "" : String(value));

function choice(setting, value) {
  const select = h("select", null, setting.choices.map((each) => h("option", { value: each, selected: each === value }, each)));
  return { element: select, read: () => select.value, write: (next) => { select.value = next; } };
}

function onOff(setting, value) {
  const box = h("input", { type: "checkbox", checked: value === true });
  return { element: box, read: () => box.checked, write: (next) => { box.checked = next === true; } };
}

// Header values are not shown again: an empty value of a known header keeps it.
function headerRows(setting, value) {
  const known = new Set(Object.keys(value ?? {}));
  const rows = h("div", { class: "rows" });
  const addRow = (name = "") => {
    const row = h("div", { class: "pair" },
      h("input", { "aria-label": "Header name", placeholder: "Name", value: name, autocomplete: "off", spellcheck: "false" }),
      h("input", { "aria-label": name ? `Value of header ${name}` : "Header value", placeholder: known.has(name) ? "unchanged" : "Value", autocomplete: "off", spellcheck: "false" }),
      h("button", { type: "button", "aria-label": `Remove header ${name}`.trim(), onclick: () => row.remove() }, "×"));
    rows.append(row);
    return row;
  };
  known.forEach((name) => addRow(name));
  const element = h("div", null, rows, h("button", { type: "button", onclick: () => addRow().querySelector("input").focus() }, "Add header"));
  const read = () => {
    const found = [...rows.children].map((row) => [...row.querySelectorAll("input")].map((each) => each.value.trim())).filter(([name]) => name);
    return Object.fromEntries(found.map(([name, text]) => [name, text === "" && known.has(name) ? null : text]));
  };
  return { element, read, group: true, write: () => { rows.replaceChildren(); } };
}

function retryPolicy(setting, value) {
  const id = `choices-${setting.name}`;
  const input = h("input", { list: id, value: typeof value === "string" ? value : JSON.stringify(value), autocomplete: "off", spellcheck: "false" });
  return {
    element: input,
    after: h("datalist", { id }, setting.choices.map((each) => h("option", { value: each }))),
    read: () => input.value.trim() || null,
    write: (next) => { input.value = plain(next); },
  };
}

// A compat signature: its preset, and what else applies once there is one.
function compatSignature(setting, value) {
  const input = (name, text, placeholder = null) => h("input", { name: `compat.${name}`, autocomplete: "off", spellcheck: "false", placeholder, value: text ?? "" });
  const select = (name, choices) => h("select", { name: `compat.${name}` }, choices.map(([each, text]) => h("option", { value: each, selected: each === (value?.[name] ?? "") }, text)));
  const usual = ["", "as the preset says"];
  const preset = select("preset", [["", setting.none], ...setting.choices.map((each) => [each, each])]);
  const secret = h("input", { type: "password", name: "compat.secret", placeholder: value ? "unchanged" : null, autocomplete: "off" });
  const members = {
    secret_encoding: select("secret_encoding", [usual, ["raw", "the text's own bytes"], ["base64", "base64"]]),
    until: input("until", value?.until, "none"),
    header: input("header", value?.header),
    content: input("content", value?.content),
    value: input("value", value?.value),
    encoding: select("encoding", [usual, ["hex", "hex"], ["base64", "base64"]]),
  };
  const replacing = h("details", { open: ["header", "content", "value", "encoding"].some((each) => value?.[each]) }, h("summary", null, "Differs from the preset"), h("div", { class: "grid-form" },
    field("Header of the signature", members.header, "Its name."),
    field("Signed content", members.content, "A template over {id}, {timestamp} and {body}."),
    field("Value of that header", members.value, "A template over {id}, {timestamp}, {signature} and {signatures}."),
    field("Encoding of the signature", members.encoding)));
  const rest = h("div", null, h("div", { class: "grid-form" },
    field("Compat secret", secret, "The one that the receiver has. It is not shown again."),
    field("Encoding of the compat secret", members.secret_encoding, "Needed if the text could be both."),
    field("Compat end", members.until, "A date such as 2027-01-31, or a time with its zone.")),
  replacing);
  const update = () => {
    rest.hidden = !preset.value;
    if (preset.value === "custom") replacing.open = true;
  };
  preset.addEventListener("change", update);
  update();
  const read = () => {
    if (!preset.value) return null;
    // Other headers are set by a command, and stay with their preset.
    const found = { preset: preset.value, ...(preset.value === value?.preset && value.headers ? { headers: value.headers } : {}) };
    Object.entries(members).forEach(([name, { value: given }]) => { if (given.trim()) found[name] = given.trim(); });
    return secret.value ? { ...found, secret: secret.value } : found;
  };
  const write = (next) => {
    Object.entries({ preset, secret, ...members }).forEach(([name, control]) => { control.value = next?.[name] ?? ""; });
    update();
  };
  const at = (member) => {
    const found = { preset, secret, ...members }[member] ?? preset;
    if (replacing.contains(found)) replacing.open = true;
    return found;
  };
  return { element: h("div", null, h("div", { class: "grid-form" }, field("Preset", preset)), rest), read, write, at, group: true, wide: true };
}

const number = (text) => (Number.isNaN(Number(text)) ? text : Number(text));
const CONTROLS = {
  text: textControl((setting) => ({ placeholder: setting.none ?? null, required: setting.required }), plain, (text) => text),
  time: textControl((setting) => ({ placeholder: setting.none ?? setting.default }), plain, (text) => text),
  count: textControl((setting) => ({ inputmode: "numeric", placeholder: setting.none ?? setting.default }), plain, number),
  number: textControl((setting) => ({ inputmode: "decimal", placeholder: setting.none ?? setting.default }), plain, number),
  list: (setting, value) => areaControl(2, (items) => (items ?? []).join("\n"), (text) => (lines(text).length || setting.none === null ? lines(text) : null))(setting, value),
  certificates: areaControl(3, plain, (text) => text.trim() || null),
  choice, switch: onOff, headers: headerRows, retry: retryPolicy, compat: compatSignature,
};

const HINTS = { list: "One per line.", headers: "Stored values are not shown.", compat: "Old secrets also sign for a day after a new one." };

// A labelled control.  `read` returns the value in the form of the API, null for the default.
export function settingField(setting, value) {
  const control = CONTROLS[setting.kind](setting, value);
  const { element, group, wide } = control;
  const errorId = `error-${setting.name}`;
  const helpId = `help-${setting.name}`;
  const error = h("small", { class: "bad", id: errorId, role: "alert" });
  const help = h("small", { id: helpId }, [setting.help, HINTS[setting.kind]].filter(Boolean).join(" "));
  const label = labelOf(setting.name);
  element.setAttribute("aria-describedby", `${helpId} ${errorId}`);
  if (!group) Object.assign(element, { name: setting.name, id: `setting-${setting.name}` });
  const place = group ? h("fieldset", { class: wide ? "field wide" : "field" }, h("legend", null, label), element, error, help)
    : setting.kind === "switch" ? h("div", { class: "field" }, h("label", { class: "pick" }, element, label), error, help)
      : h("div", { class: "field" }, h("label", { for: element.id }, label), element, control.after, error, help);
  const initial = control.read();
  return {
    setting, place,
    read: control.read,
    write: control.write,
    initial,
    isChanged: () => !same(control.read(), initial),
    // `member` is the part of the value that is wrong.
    showError(text, member) {
      error.textContent = text ?? "";
      [element, ...element.querySelectorAll("[aria-invalid]")].forEach((each) => each.removeAttribute("aria-invalid"));
      if (!text) return undefined;
      const target = control.at?.(member) ?? (group ? element.querySelector("input") ?? element.querySelector("button") : element);
      target.setAttribute("aria-invalid", "true");
      return target;
    },
  };
}

// A value as one line; header values are never shown.
export function showValue(setting, value) {
  if (value === null || value === undefined) return setting.none ?? showDefault(setting);
  if (Array.isArray(value)) return value.join(" ") || "none";
  if (setting.kind === "switch") return value ? "yes" : "no";
  if (setting.kind === "certificates") return "certificates";
  if (setting.kind === "headers") return Object.entries(value).map(([name, text]) => (text === null ? name : `${name} (new value)`)).join(", ") || "none";
  if (setting.kind === "compat") return showCompat(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function showCompat({ preset, until, secret, ...members }) {
  const replaced = Object.entries(members).map(([name, text]) => `${name.replaceAll("_", " ")} ${typeof text === "object" ? JSON.stringify(text) : text}`);
  return [[preset, until && `until ${until}`, secret && "(new secret)"].filter(Boolean).join(" "), ...replaced].join(", ");
}

const showDefault = (setting) => (setting.default === null ? "none" : `${showValue(setting, setting.default)} (default)`);
