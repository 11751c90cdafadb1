// Copy a text, and say so on the button that was pressed.

import { h } from "./dom.js";

const SHOWN_MS = 4000;
const busy = new WeakSet();

// navigator.clipboard needs a secure context; execCommand copies a selection without one.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "away", "aria-hidden": "true" }, text);
    // A modal dialog keeps the focus inside of it.
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

export async function copyFrom(button, text, said = "✓") {
  if (busy.has(button)) return;
  busy.add(button);
  const before = [...button.childNodes];
  const label = button.getAttribute("aria-label");
  const shown = await copy(text) ? said : "not copied";
  button.replaceChildren(shown);
  if (label) button.setAttribute("aria-label", shown === said ? "Copied" : shown);
  setTimeout(() => {
    button.replaceChildren(...before);
    if (label) button.setAttribute("aria-label", label);
    busy.delete(button);
  }, SHOWN_MS);
}

export const copyButton = (label, text) => h("button", { type: "button", onclick: (event) => copyFrom(event.currentTarget, text, "Copied") }, label);
