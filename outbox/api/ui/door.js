// Whoever has no token yet, or no good one.

import { session } from "./api.js";
import { h } from "./dom.js";
import { field } from "./talk.js";

export function door(enter, text) {
  const input = h("input", { name: "token", type: "password", required: true, autocomplete: "off", spellcheck: "false",
    placeholder: "obx_…", "aria-describedby": "how" });
  document.getElementById("main").replaceChildren(h("form", {
    class: "door",
    onsubmit: (event) => {
      event.preventDefault();
      session.token = input.value.trim();
      enter();
    },
  }, h("h1", null, "Sign in"), text && h("p", { class: "bad", role: "alert" }, text),
    field("Token", input),
    h("button", { type: "submit", class: "main" }, "Sign in"),
    h("p", { id: "how", class: "hint" }, "Whoever runs this outbox makes tokens, such as with ", h("code", null, "outbox token add me --scope read --scope operate"),
      ". It stays in this tab, and is forgotten when the tab is closed.")));
  input.focus();
}
