// Talking with who is there: questions, notices, and what came of something.

import { h, show } from "./dom.js";
import { sentence } from "./say.js";

let noticeTimer = 0;

export function notice(text, kind = "good") {
  const place = document.getElementById("notice");
  show(place, text && h("p", { class: kind }, h("span", null, text),
    h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => notice("") }, "×")));
  clearTimeout(noticeTimer);
  if (text && kind === "good") noticeTimer = setTimeout(() => notice(""), 8000);
}

// A question; resolves with the form's values, or with null.  One that is `sure` is only
// answered by its button: what it shows is shown this once.
export function ask(title, body, { yes = "Do it", kind = "main", no = "Leave it", sure = false } = {}) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    let answer = null;
    const form = h("form", {
      method: "dialog",
      onsubmit: (event) => {
        event.preventDefault();
        answer = Object.fromEntries(new FormData(form));
        dialog.close();
      },
    }, h("h2", { id: "asked" }, title), body,
      h("div", { class: "actions" },
        no && h("button", { type: "button", onclick: () => dialog.close() }, no),
        h("button", { type: "submit", class: kind }, yes)));
    // A browser lets Esc through the second time, whatever the page says.
    dialog.onclose = () => (sure && !answer ? dialog.showModal() : resolve(answer));
    dialog.oncancel = (event) => { if (sure && event.cancelable) event.preventDefault(); };
    dialog.setAttribute("aria-labelledby", "asked");
    dialog.replaceChildren(form);
    dialog.showModal();
    (form.querySelector("input, select, textarea") ?? form.querySelector("[type=submit]")).focus();
  });
}

export const field = (label, control, hint) => h("label", { class: "field" },
  h("span", null, label), control, hint && h("small", null, hint));

export const why = (hint = "It stands in the journal.") => field("Why", h("input", { name: "why", maxlength: 200, autocomplete: "off" }), hint);

// Ask something that changes nothing; what stands in the way is said.
export async function attempt(asking, done = "") {
  try {
    const told = await asking();
    notice(typeof done === "function" ? done(told) : done);
    return told;
  } catch (error) {
    notice(sentence(error.message), "bad");
    return undefined;
  }
}

// Do something, say what came of it, and have views look at it at once.
export async function act(doing, done) {
  const told = await attempt(doing, done);
  dispatchEvent(new Event("acted"));
  return told;
}

// A text that is to be taken away.
export function copied(label, text) {
  const input = h("input", { readonly: true, value: text, "aria-label": label, onclick: (event) => event.target.select() });
  return h("div", { class: "copied" }, input, h("button", { type: "button", onclick: async (event) => {
    input.select();
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Only pages that came safely may use the clipboard; what is selected may be copied anyway.
      document.execCommand("copy");
    }
    event.target.textContent = "Copied";
  } }, "Copy"));
}
