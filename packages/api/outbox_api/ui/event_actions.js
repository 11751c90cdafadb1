// Find or publish an event, or send it again.

import { post, session } from "./api.js";
import { h } from "./dom.js";
import { confirm, field, notice, runAction } from "./dialogs.js";
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

// Send an event to an endpoint that has received it.
export async function sendAgain(endpoint, event) {
  const yes = await confirm(`Send ${event.type} to ${endpoint} again?`, [
    h("p", null, "It is appended to the endpoint's deliveries, behind what is pending with its key, and gets an X-Delivery of its own."),
    h("p", null, "So a receiver that has processed the event processes it again."),
  ], { yes: "Send again" });
  if (yes) await runAction(() => post("/v1/replays", { endpoint, events: [event.event_id] }), "The event is sent again.");
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
