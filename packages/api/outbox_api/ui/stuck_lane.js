// Actions on failing lanes, and on the delivery that one is stuck on.

import { button } from "./components.js";
import { h } from "./dom.js";
import * as endpointActions from "./endpoint_actions.js";

// Failures of a lane that is held until a person acts.
const HELD = ["forgot", "ahead", "foreign", "fenced"];
// Failures of brokers are never the fault of one delivery: the next one would fail as well.
const OF_BROKERS = ["refused", "unavailable", "misconfigured", "moved", "unknown"];
const UNREACHABLE = ["connect", "dns", "tls", "egress_refused"];
// The application has not processed the delivery, or a server in front of it responded.
const UNPROCESSED = [408, 421, 425, 429, 502, 503, 504];

const refill = (endpoint) => button("Refill", () => endpointActions.refill(endpoint), { title: "Append again what the stream has lost" });
const adopt = (endpoint) => button("Adopt", () => endpointActions.adopt(endpoint), { title: "Continue with the stream as it is" });

export const retryAction = (endpoint, kind = "") => button("Retry now", () => endpointActions.retryNow(endpoint),
  { kind, title: "Reset the circuit breaker and the retry times of the lanes" });

// Null: its broker is at fault.
export const pauseAction = (endpoint, last) => (OF_BROKERS.includes(last?.failure) ? null
  : button("Pause", () => endpointActions.pause(endpoint), { title: "Hold its deliveries until its receiver works" }));

// Whether the delivery is probably at fault, and not its receiver, as in `dead_letters/skip.py`.
function skipHelps({ failure, status }, health, failingLanes) {
  if (failure === "missing") return true;
  return health === "healthy" ? !UNREACHABLE.includes(failure)
    : health !== "rejecting" && failingLanes <= 1 && status !== undefined && !UNPROCESSED.includes(status);
}

// `lane` has a name, the sequence that it waits for, its last response, and `behind`: how many
// deliveries wait behind that one, if that is known. `health` is the endpoint's. Null: only its
// receiver or its broker can be repaired.
export function stuckAction(endpoint, lane, { health, failingLanes }) {
  const last = lane.last_response ?? {};
  if (HELD.includes(last.failure)) return h("span", { class: "actions" }, last.failure === "forgot" ? refill(endpoint) : null, adopt(endpoint));
  if (OF_BROKERS.includes(last.failure)) return null;
  if (!skipHelps(last, health, failingLanes)) return null;
  return button("Skip", () => endpointActions.skip(endpoint, lane), { title: "Dead-letter this delivery, so that the lane continues" });
}
