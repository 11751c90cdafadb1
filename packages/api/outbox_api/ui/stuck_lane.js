// Actions on failing lanes, and on the delivery that one is stuck on.

import { button } from "./components.js";
import { h } from "./dom.js";
import * as endpointActions from "./endpoint_actions.js";

// Failures of a lane that is held until a person acts.
const HELD = ["forgot", "ahead", "foreign", "fenced"];
// Failures that are never the fault of one delivery: of brokers, and of receivers that no request
// reaches. The next delivery would fail as well.
const OF_ALL = ["refused", "unavailable", "misconfigured", "moved", "unknown", "connect", "dns", "tls", "egress_refused"];

const refill = (endpoint) => button("Refill", () => endpointActions.refill(endpoint), { title: "Append again what the stream has lost" });
const adopt = (endpoint) => button("Adopt", () => endpointActions.adopt(endpoint), { title: "Continue with the stream as it is" });

export const retryAction = (endpoint) => button("Retry now", () => endpointActions.retryNow(endpoint),
  { title: "Reset the circuit breaker and the retry times of the lanes" });

// `lane` has a name, the sequence that it waits for, its last response, and `behind`: how many
// deliveries wait behind that one, if that is known.
export function stuckAction(endpoint, lane, label = "Skip") {
  const { failure } = lane.last_response ?? {};
  if (HELD.includes(failure)) return h("span", { class: "actions" }, failure === "forgot" ? refill(endpoint) : null, adopt(endpoint));
  if (OF_ALL.includes(failure)) return null;
  return button(label, () => endpointActions.skip(endpoint, lane), { title: "Dead-letter this delivery, so that the lane continues" });
}
