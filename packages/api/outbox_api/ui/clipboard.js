// Copy a text, and say so on the button that was pressed.

import { h } from "./dom.js";

const SHOWN_MS = 4000;

// navigator.clipboard needs a secure context; execCommand copies a selection without one.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "away", "aria-hidden": "true" }, text);
    // A modal dialog keeps the focus inside of it.
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export async function copyFrom(button, text, said = "✓") {
  const before = [...button.childNodes];
  await copy(text);
  if (button.textContent === said) return;
  button.replaceChildren(said);
  setTimeout(() => button.replaceChildren(...before), SHOWN_MS);
}

export const copyButton = (label, text) => h("button", { type: "button", onclick: (event) => copyFrom(event.currentTarget, text, "Copied") }, label);
