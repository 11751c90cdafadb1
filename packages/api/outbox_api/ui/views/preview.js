// Preview of the request or message that delivers an event; nothing is sent.

import { get, name } from "../api.js";
import { h, show } from "../dom.js";
import { code } from "../components.js";
import { requestText, toCurl } from "../curl.js";
import { copyButton } from "../clipboard.js";
import { field } from "../dialogs.js";
import { sentence } from "../format.js";
import { once, permanent } from "../live.js";
import { link } from "../router.js";

function draw(preview) {
  const isMessage = preview.method === "APPEND";
  const masked = preview.headers.some(([, value]) => value === "***");
  return [
    h("h2", null, isMessage ? "Message" : "Request"),
    !preview.is_sequenced && h("p", { class: "hint" }, "The event has no delivery to this endpoint: its lane and numbers are examples."),
    h("div", { class: "actions" }, copyButton(isMessage ? "Copy message" : "Copy request", requestText(preview)),
      !isMessage && copyButton("Copy as cURL", toCurl(preview)),
      h("a", { class: "button", href: link("trace", [preview.event_id]) }, "Trace event")),
    code(requestText(preview)),
    preview.body_base64 ? h("p", { class: "hint" }, "The body is shown in Base64, because it is not text.") : null,
    masked ? h("p", { class: "hint" }, "*** stands for a signature, or for the value of a header of the endpoint. A copied command is refused until you put them in.") : null,
  ].filter(Boolean);
}

export function view(place, [endpoint = ""], values) {
  const result = h("div", { "aria-live": "polite" });
  const input = h("input", { name: "event", value: values.event ?? "", required: true, autocomplete: "off", spellcheck: "false",
    placeholder: "event id or key", title: "Event id, X-Delivery, once key, key (its newest event) or outbox id" });
  show(place, h("h1", null, "Preview of ", h("a", { href: link("endpoint", [endpoint]) }, endpoint)),
    h("p", { class: "hint" }, "The first attempt of an event's newest delivery, in the endpoint's present format. Nothing is sent."),
    h("form", {
      class: "find", role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        if (input.value.trim()) location.hash = link("preview", [endpoint], { event: input.value.trim() });
      },
    }, field("Event", input), h("button", { type: "submit", class: "main" }, "Preview")), result);
  return once(place, async (signal) => {
    if (!values.event) {
      // The newest event is a good example, unless somebody is about to type another one.
      const { items } = await get("/v1/events", { limit: 1 }, signal);
      if (items.length && !input.value && input !== document.activeElement) input.value = items[0].id;
      return input.focus();
    }
    try {
      show(result, draw(await get(`/v1/endpoints/${name(endpoint)}/preview`, { event: values.event }, signal)));
    } catch (error) {
      if (!permanent(error)) throw error;
      show(result, h("p", { class: "bad", role: "alert" }, sentence(error.message)));
    }
    return undefined;
  });
}
