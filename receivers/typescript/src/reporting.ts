/** Counts and log lines of a receiver. */

import type { CatchUpResult } from "./catch-up.js";
import type { DeliveryResult } from "./inbox/process.js";
import type { RequestRow } from "./inbox/store.js";
import type { Message } from "./message.js";
import { describeRanges } from "./ranges.js";
import type { ReceiverResponse, RequestOutcome } from "./requests.js";
import type { Verified } from "./verification.js";

/** Where a receiver logs; `console` fits. Errors are passed as second argument. */
export interface Logger {
  info(text: string): void;
  warn(text: string, error?: unknown): void;
  error(text: string, error?: unknown): void;
}

/** Counters since the receiver was created. */
export interface ReceiverTotals {
  /** Requests by outcome. */
  readonly requests: Readonly<Record<RequestOutcome, number>>;
  /** Deliveries fetched from the relay and processed. */
  readonly fetched: number;
  /** Deliveries before which sequence numbers were missing. */
  readonly gaps: number;
  /** Deliveries overtaken by a higher sequence number. */
  readonly old: number;
  /** Missing sequence numbers overtaken by more than the tolerance. Alert on this one. */
  readonly overdue: bigint;
}

/** Called with each committed delivery and its result. */
export type DeliveryListener = (message: Message, result: DeliveryResult) => void;

/** A logger that prefixes each line and writes to the console. */
export const consoleLogger: Logger = {
  info: (text) => console.info(`outbox-receiver: ${text}`),
  warn: (text, ...error) => console.warn(`outbox-receiver: ${text}`, ...error),
  error: (text, ...error) => console.error(`outbox-receiver: ${text}`, ...error),
};

/** Counts what a receiver does, and logs what is missing. */
export class ReceiverReports {
  readonly #log: Logger;
  readonly #onDelivery: DeliveryListener | null;
  readonly #totals = {
    requests: {
      processed: 0,
      duplicate: 0,
      conflict: 0,
      rejected: 0,
      refused: 0,
      failed: 0,
      put_off: 0,
    },
    fetched: 0,
    gaps: 0,
    old: 0,
    overdue: 0n,
  };

  constructor(log: Logger, onDelivery: DeliveryListener | null) {
    this.#log = log;
    this.#onDelivery = onDelivery;
  }

  get totals(): ReceiverTotals {
    return { ...this.#totals, requests: { ...this.#totals.requests } };
  }

  requestEnded(outcome: RequestOutcome): void {
    this.#totals.requests[outcome]++;
  }

  /** Count, log and report a committed delivery. */
  deliveryCommitted(message: Message, result: DeliveryResult): void {
    const { observation, overdue, outcome } = result;
    const { lane, sequence, deliveryId } = message;
    this.#totals.gaps += observation?.kind === "gap" ? 1 : 0;
    this.#totals.old += observation?.kind === "old" ? 1 : 0;
    for (const [lo, hi] of overdue) {
      this.#totals.overdue += hi - lo + 1n;
    }
    if (overdue.length > 0) {
      this.#log.error(`lane ${lane}: overdue, still missing: ${describeRanges(overdue)}`);
    } else if (observation && observation.missing.length > 0) {
      this.#log.warn(`lane ${lane}: sequence ${sequence} arrived before ${describeRanges(observation.missing)}`);
    }
    if (outcome === "conflict") {
      this.#log.error(`lane ${lane}: sequence ${sequence} was used by another delivery than ${deliveryId}`);
    }
    if (observation?.lost) {
      const lost = describeRanges([observation.lost]);
      this.#log.error(`lane ${lane}: the sender has no record of sequences ${lost}, which were received`);
    }
    try {
      this.#onDelivery?.(message, result);
    } catch (error) {
      // The delivery is committed: an error of the callback must not change the response.
      this.#log.error(`the onDelivery callback failed for ${deliveryId}`, error);
    }
  }

  /** Count a delivery that was fetched and committed. */
  deliveryFetched(result: DeliveryResult): void {
    this.#totals.fetched += result.outcome === "fresh" ? 1 : 0;
  }

  /** Log the result of a catch-up, unless nothing was fetched. */
  caughtUp(result: CatchUpResult): void {
    const { lane, fetched, deadLettered, unavailable, failed } = result;
    if (fetched === 0 && deadLettered === 0 && unavailable.length === 0 && failed === null) {
      return;
    }
    const dead = deadLettered > 0 ? `; dead-lettered: ${deadLettered}` : "";
    const lost = unavailable.length > 0 ? `; refused or no longer retained: ${describeRanges(unavailable)}` : "";
    const text = `lane ${lane}: caught up with ${fetched} deliveries${dead}${lost}`;
    if (failed === null) {
      this.#log.info(text);
    } else {
      this.#log.warn(`${text}; sequence ${failed} could not be processed`);
    }
  }
}

/** Build the row of a request for the table of requests. Unsigned requests are not logged: they could fill it. */
export function requestRow(verified: Verified, response: ReceiverResponse): RequestRow {
  const [first] = verified.messages;
  const types = new Set(verified.messages.map((message) => message.type));
  const [type] = types.size === 1 ? types : [null];
  return {
    deliveryId: verified.messageId,
    lane: first?.lane ?? null,
    sequence: first?.sequence ?? null,
    type: type ?? null,
    attempt: first?.attempt ?? null,
    outcome: response.outcome,
    status: response.status,
    reason: response.text,
  };
}
