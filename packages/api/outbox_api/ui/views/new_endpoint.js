// Create an endpoint.

import { Problem, get, name, post, put, session } from "../api.js";
import { h, show } from "../dom.js";
import { notice } from "../dialogs.js";
import { showSecret } from "../endpoint_access.js";
import { endpointForm } from "../endpoint_form.js";
import { sentence } from "../format.js";
import { once } from "../live.js";
import { link, navigate } from "../router.js";

async function create(form) {
  form.showProblem(null);
  const body = { ...form.changes(), ...form.secret() };
  if (form.ed25519()) body.ed25519 = true;
  if (form.from()) body.from = form.from();
  let made;
  try {
    made = await post("/v1/endpoints", body);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    form.showProblem(error.message);
    return;
  }
  let failure = "";
  const warnings = made.warnings.map(sentence).join(" ");
  if (form.isBroker() && form.credentials()) {
    try {
      await put(`/v1/endpoints/${name(made.name)}/credentials`, { credentials: form.credentials() });
    } catch (error) {
      failure = sentence(error.message);
    }
  }
  // A broker's messages have no signature.
  if (!form.isBroker() && made.secret) await showSecret(made.name, made.secret);
  navigate(link("endpoint", [made.name]), () => (failure
    ? notice(`${made.name} was created without its credentials. ${failure}`, "bad")
    : notice(`${made.name} was created. ${body.from ? "It first gets earlier events." : "It receives new events."} ${warnings}`.trim(), warnings ? "bad" : "good")));
}

export function view(place) {
  const content = h("div");
  show(place, h("h1", null, "New endpoint"), content);
  if (!session.may("operate")) {
    show(content, h("p", null, "This token may not change anything."));
    return undefined;
  }
  return once(content, async (signal) => {
    const form = endpointForm(await get("/v1/endpoint-settings", {}, signal), null);
    const submit = h("button", { type: "submit", class: "main" }, "Create endpoint");
    show(content, h("form", {
      novalidate: true, "aria-label": "New endpoint",
      onsubmit: async (event) => {
        event.preventDefault();
        submit.disabled = true;
        await create(form).finally(() => { submit.disabled = false; });
      },
    }, form.element, h("div", { class: "actions" }, submit, h("a", { class: "button", href: link("endpoints") }, "Cancel"))));
    content.querySelector("input").focus();
  });
}
