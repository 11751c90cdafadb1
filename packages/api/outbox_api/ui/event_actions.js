// Find or publish an event.

import { post, session } from "./api.js";
import { h } from "./dom.js";
import { confirm, field, notice } from "./dialogs.js";
import { parsePayload } from "./json.js";
import { link, navigate } from "./router.js";

const text = (id, more) => h("input", { name: id, autocomplete: "off", spellcheck: "false", ...more });

export async function publish() {
  const result = await confirm("Publish an event", [
    h("p", null, "Every endpoint that subscribes to its type receives it."),
    h("div", { class: "grid-form" },
      field("Type", text("type", { required: true, placeholder: "order.paid" })),
      field("Key", text("key", { placeholder: "none" }), "Events with the same key are delivered in order."),
      session.tenant === null && field("Tenant", text("tenant", { placeholder: "none" }))),
    field("Payload", h("textarea", { name: "payload", rows: 6, spellcheck: "false" }, "{}")),
  ], { yes: "Publish", send: (values) => post("/v1/events", {
    type: values.type.trim(), key: values.key.trim() || null, tenant: values.tenant?.trim() || null, payload: parsePayload(values.payload) }) });
  if (result) navigate(link("trace", [result.id]), () => notice("The event is published."));
}

// Open the trace of an event.
export function searchForm() {
  return h("form", {
    class: "find", role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      const id = new FormData(event.target).get("id").trim();
      if (id) location.hash = link("trace", [id]);
    },
  }, field("Event", h("input", { name: "id", autocomplete: "off", spellcheck: "false",
    placeholder: "key, event id, X-Delivery, once key or outbox id", title: "Event id, X-Delivery, once key, key (its newest events) or outbox id" })),
  h("button", { type: "submit", class: "main" }, "Trace"));
}
