// Actions on the delivery that a lane is stuck on.

import { button } from "./components.js";
import * as endpointActions from "./endpoint_actions.js";

// Actions on a lane that is held until a person acts, by its failure.
const HELD_ACTIONS = {
  forgot: (endpoint) => button("Refill", () => endpointActions.refill(endpoint), { title: "Append again what the stream has lost" }),
};
// Other failures that only brokers have: they are never the fault of one delivery.
const OF_BROKERS = ["ahead", "foreign", "fenced", "refused", "unavailable", "misconfigured", "moved", "unknown"];

// `lane` has a name, the sequence that it waits for, its last response, and `behind`: how many
// deliveries wait behind that one, if that is known.
export function stuckAction(endpoint, lane, label = "Skip") {
  const { failure } = lane.last_response ?? {};
  if (HELD_ACTIONS[failure]) return HELD_ACTIONS[failure](endpoint);
  if (OF_BROKERS.includes(failure)) return null;
  return button(label, () => endpointActions.skip(endpoint, lane), { title: "Dead-letter this delivery, so that the lane goes on" });
}
