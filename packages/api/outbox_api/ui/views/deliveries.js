// Deliveries to all endpoints that a tenant, a key or an event selects.

import { session } from "../api.js";
import { deliveryLog, logFilters } from "../delivery_log.js";
import { h, show } from "../dom.js";
import { link } from "../router.js";

const isNarrow = (values) => session.tenant !== null || ["endpoint", "tenant", "key", "event"].some((each) => values[each]);

export function view(place, _, { show: shown, ...values }) {
  const log = h("div");
  show(place, h("h1", null, "Deliveries", values.endpoint && [" to ", h("a", { href: link("endpoint", [values.endpoint]) }, values.endpoint)]),
    logFilters(values, {}, (next) => { location.hash = link("deliveries", [], next); }), log);
  if (!isNarrow(values)) {
    show(log, h("p", { class: "hint" }, "Name an endpoint, a tenant, a key or an event: ",
      h("code", null, "endpoint:shop"), ", ", h("code", null, "tenant:acme"), ", ", h("code", null, "key:order-7"), ". Then add what you look for: ",
      h("code", null, "failed"), ", ", h("code", null, "status:5xx"), "."),
    h("p", null, h("a", { href: link("endpoints") }, "Endpoints"), " lead to their deliveries, too."));
    return undefined;
  }
  return deliveryLog(log, values, { href: (delivery) => link("deliveries", [], delivery === null ? values : { ...values, show: delivery }), shown });
}
