// Dialogs, notices and the result of actions.

import { copyButton } from "./clipboard.js";
import { h, show } from "./dom.js";
import { sentence } from "./format.js";

let noticeTimer = 0;

export function notice(text, kind = "good") {
  const place = document.getElementById("notice");
  show(place, text && h("p", { class: kind }, h("span", null, text),
    h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => notice("") }, "×")));
  clearTimeout(noticeTimer);
  if (text && kind === "good") noticeTimer = setTimeout(() => notice(""), 8000);
}

// Open a modal dialog.  Resolves with the form's values, or with null when it is cancelled.
// Only its button closes a `persistent` dialog: it shows a value that is not shown again.
// With `send(values, form)` it resolves with the result, and stays open with the problem of a failed request.
export function confirm(title, body, { yes = "Confirm", kind = "main", no = "Cancel", persistent = false, send } = {}) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    let values = null;
    const problem = h("p", { class: "bad", role: "alert" });
    const submit = h("button", { type: "submit", class: kind }, yes);
    async function submitForm() {
      const given = Object.fromEntries(new FormData(form));
      submit.disabled = true;
      try {
        values = send ? await send(given, form) : given;
        if (form.isConnected) dialog.close();
      } catch (error) {
        show(problem, sentence(error.message));
        problem.scrollIntoView({ block: "nearest" });
      }
      submit.disabled = false;
    }
    const form = h("form", {
      method: "dialog",
      onsubmit: (event) => {
        event.preventDefault();
        submitForm();
      },
    }, h("h2", { id: "dialog-title" }, title), body, send && problem,
      h("div", { class: "actions" },
        no && h("button", { type: "button", onclick: () => dialog.close() }, no), submit));
    // Browsers ignore preventDefault on a second Esc, so the dialog is reopened.
    dialog.onclose = () => {
      if (persistent && !values) return dialog.showModal();
      // A secret does not stay in the page.
      dialog.replaceChildren();
      return resolve(values);
    };
    dialog.oncancel = (event) => { if (persistent && event.cancelable) event.preventDefault(); };
    dialog.setAttribute("aria-labelledby", "dialog-title");
    dialog.replaceChildren(form);
    dialog.showModal();
    (form.querySelector("input, select, textarea") ?? form.querySelector("[type=submit]")).focus();
  });
}

export const field = (label, control, hint) => h("label", { class: "field" },
  h("span", null, label), control, hint && h("small", null, hint));

// One of several answers, of which one is chosen.
export const choice = (name, value, text, hint, checked) => h("div", { class: "field" },
  h("label", { class: "pick" }, h("input", { type: "radio", name, value, checked }), text), h("small", null, hint));

export const comment = (hint = "Recorded in the journal.") => field("Comment", h("input", { name: "comment", maxlength: 200, autocomplete: "off" }), hint);

// Run a request that changes nothing; show an error as a notice.
export async function tryRequest(request, success = "") {
  try {
    const result = await request();
    notice(typeof success === "function" ? success(result) : success);
    return result;
  } catch (error) {
    notice(sentence(error.message), "bad");
    return undefined;
  }
}

// Run a request that changes something, show its result, and refresh the view at once.
export async function runAction(request, success) {
  const result = await tryRequest(request, success);
  dispatchEvent(new Event("acted"));
  return result;
}

// A read-only text with a copy button.
export function copyable(label, text) {
  const input = h("input", { readonly: true, value: text, "aria-label": label, onclick: (event) => event.target.select() });
  return h("div", { class: "copied" }, input, copyButton("Copy", text));
}
