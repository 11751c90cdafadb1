/** Options of a receiver, and the types of its handlers. */

import type { DeliverySource } from "./fetch-client.js";
import type { InboxOptions } from "./inbox/inbox.js";
import type { Message } from "./message.js";
import type { DeliveryListener, Logger } from "./reporting.js";
import type { ReceiverRequest, ReceiverResponse } from "./requests.js";
import type { Verified, VerifierOptions } from "./verification.js";

/**
 * Processes one event. The transaction `tx` records the delivery; effects written with it are committed together with
 * the delivery or not at all. An error rolls back both: `Refuse` makes the event a dead letter (422), `Busy` postpones
 * it (503), any other is retried (500).
 */
export type Handler<Tx> = (message: Message, tx: Tx) => void | Promise<void>;

/** Processes a request of another Standard Webhooks sender. */
export type ForeignHandler<Tx> = (verified: Verified, body: Uint8Array, tx: Tx) => void | Promise<void>;

/**
 * Policy for a delivery when deliveries before it are missing.
 *
 * - `report`: process it, and report the missing numbers;
 * - `hold`: hold its request for up to `holdS` seconds until the missing ones arrive;
 * - `catch_up`: fetch the missing ones from the relay and process them first; needs `fetch`.
 */
export type GapPolicy = "report" | "hold" | "catch_up";

/**
 * What happens to an event whose type has no handler.
 *
 * - `refuse`: the response is 422, and the event is a dead letter;
 * - `ignore`: it is recorded, and never processed.
 */
export type UnhandledPolicy = "refuse" | "ignore";

/** Options of a receiver. */
export interface ReceiverOptions extends VerifierOptions {
  /** Retention and order options of the inbox. */
  readonly inbox?: InboxOptions;
  /** Where missing deliveries and payloads are fetched, a `FetchClient`; none by default. */
  readonly fetch?: DeliverySource | null;
  /** Policy for a delivery when deliveries before it are missing; `report` by default. */
  readonly gaps?: GapPolicy;
  /** What happens to an event whose type has no handler; `refuse` by default. */
  readonly unhandled?: UnhandledPolicy;
  /** With `hold`, how long a request is held, in seconds; 5 by default. */
  readonly holdS?: number;
  /** Requests held at once; more get 503; 1,000 by default. */
  readonly heldMax?: number;
  /** Insert each signed request into the table of requests; false by default. */
  readonly logRequests?: boolean;
  /** Larger bodies get 413; 1 MiB by default. */
  readonly bodyBytesMax?: number;
  /** Requests processed at once; more get 503; 100 by default. */
  readonly inFlightMax?: number;
  /** Called after the commit with each delivery and its result. */
  readonly onDelivery?: DeliveryListener;
  /** Where errors and missing numbers are logged; the console by default. */
  readonly logger?: Logger;
}

/** What adapters for HTTP servers need of a receiver. */
export interface HttpReceiver {
  /** Largest request body accepted, in bytes. */
  readonly bodyBytesMax: number;
  /** Where the receiver logs. */
  readonly logger: Logger;
  /** Process a request and return its response; never rejects. */
  handle(request: ReceiverRequest): Promise<ReceiverResponse>;
}
