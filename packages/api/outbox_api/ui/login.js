// Login form.

import { session } from "./api.js";
import { h } from "./dom.js";
import { field } from "./dialogs.js";

export function showLogin(onToken, error) {
  const input = h("input", { name: "token", type: "password", required: true, autocomplete: "off", spellcheck: "false",
    placeholder: "obx_…", "aria-describedby": "how" });
  document.getElementById("main").replaceChildren(h("form", {
    class: "login",
    onsubmit: (event) => {
      event.preventDefault();
      session.token = input.value.trim();
      onToken();
    },
  }, h("h1", null, "Sign in"), error && h("p", { class: "bad", role: "alert" }, error),
    field("Token", input),
    h("button", { type: "submit", class: "main" }, "Sign in"),
    h("p", { id: "how", class: "hint" }, "An operator creates tokens, for example with ", h("code", null, "outbox token add me --scope read --scope operate"),
      ". The token is stored in this tab only and removed when you close the tab.")));
  input.focus();
}
