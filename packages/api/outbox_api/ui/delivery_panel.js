// Side panel of a delivery: timeline, attempts, and the last request, rebuilt.

import { get, name, session } from "./api.js";
import { badge, code } from "./components.js";
import { requestText } from "./curl.js";
import { attempts, deliveryActions, deliveryFacts } from "./delivery_details.js";
import { copyButton } from "./clipboard.js";
import { h, show } from "./dom.js";
import { count } from "./format.js";
import { live } from "./live.js";
import { link } from "./router.js";
import { timeline } from "./timeline.js";

const REFRESH_MS = 5000;

function draw(trace, onClose) {
  const { event } = trace;
  return [
    h("header", null, h("h2", null, event.type, " ", h("small", null, event.key ?? "")),
      h("button", { type: "button", class: "plain", "aria-label": "Close", title: "Close (Esc)", onclick: onClose }, "×")),
    h("p", null, h("a", { href: link("trace", [event.event_id]) }, "Trace the event"), " to all of its endpoints"),
    trace.deliveries.map((each) => h("section", { "data-key": `${each.lane}/${each.sequence}` },
      h("h3", null, badge(each.state), ` sequence ${count(each.sequence)} of lane `, h("code", null, each.lane)),
      deliveryActions(each, event), deliveryFacts(each), attempts(each, { narrow: true }),
      each.request && h("details", { open: true },
        h("summary", null, `Request of attempt ${each.request.attempt}, rebuilt without its signature`),
        copyButton("Copy request", requestText(each.request)), code(requestText(each.request))))),
    timeline(trace, session.now()),
  ];
}

// Show the delivery with this X-Delivery.  Returns a function that stops its refreshes.
export function openPanel(place, delivery, onClose) {
  show(place, h("p", { class: "hint" }, "Loading…"));
  return live(place, async (signal) => {
    show(place, draw(await get(`/v1/deliveries/${name(delivery)}`, {}, signal), onClose));
  }, { every: REFRESH_MS, missing: "This delivery is not in the log.",
    otherwise: () => h("button", { type: "button", onclick: onClose }, "Close") });
}
