/** Catch-up of a receiver: fetches deliveries and payloads from the relay, and processes them as if received. */

import { catchUpLane, lanesBehind, type CatchUpResult, type FetchedOutcome } from "./catch-up.js";
import { Busy, FetchError, UnhandledType, UnreadablePayload, UsageError } from "./errors.js";
import type { DeliverySource } from "./fetch-client.js";
import type { Inbox } from "./inbox/inbox.js";
import type { DeliveryResult } from "./inbox/process.js";
import type { StoredLane } from "./inbox/store.js";
import { NEW_LANE, type LaneGaps } from "./lane-order.js";
import type { Message } from "./message.js";
import type { Logger, ReceiverReports } from "./reporting.js";
import type { ReceiverRequest, ReceiverResponse } from "./requests.js";
import { UNAVAILABLE_S } from "./responses.js";
import type { ReceiverTransactions } from "./transactions.js";
import type { Verified } from "./verification.js";

/** What the catch-up needs of its receiver. */
export interface CatchUpParts<Tx> {
  readonly source: DeliverySource | null;
  readonly inbox: Inbox<Tx>;
  readonly transactions: ReceiverTransactions<Tx>;
  readonly reports: ReceiverReports;
  readonly logger: Logger;
  /** Verify a fetched request. */
  readonly read: (request: ReceiverRequest) => Verified | ReceiverResponse;
  /** Process a delivery although deliveries before it are missing. */
  readonly process: (message: Message) => Promise<DeliveryResult>;
  /** Log an error and return its response. */
  readonly failed: (error: unknown, messageId: string) => ReceiverResponse;
}

/** Fetches and processes the missing deliveries of a receiver. */
export class ReceiverCatchUp<Tx> {
  readonly #parts: CatchUpParts<Tx>;

  constructor(parts: CatchUpParts<Tx>) {
    this.#parts = parts;
  }

  /** See `Receiver.catchUp`. */
  async catchUp(lane?: string): Promise<CatchUpResult[]> {
    const source = this.#requireFetch();
    await this.#parts.transactions.createTables();
    const known = await this.#parts.transactions.run((tx) => this.#parts.inbox.lanes(tx));
    const lanes = lane !== undefined ? [lane] : lanesBehind(known, await source.lanes(), this.#parts.inbox.fromStart);
    const results: CatchUpResult[] = [];
    for (const each of lanes) {
      results.push(await this.#catchUpLane(source, each, known));
    }
    return results;
  }

  /** See `Receiver.fetchPayload`. */
  async fetchPayload(message: Message): Promise<unknown> {
    const item = await this.#requireFetch().delivery(message.lane, message.sequence);
    if (item.request === null) {
      const reason = item.missing ? "is gone, and nothing has erased it" : "was erased";
      throw new FetchError(`the event of delivery ${message.deliveryId} ${reason}`);
    }
    const found = this.#readFetched(item.request);
    if (found.deliveryId !== message.deliveryId) {
      throw new FetchError(`the relay returned another delivery than ${message.deliveryId}`);
    }
    return found.data;
  }

  /**
   * Fetch the missing deliveries before this one.
   *
   * @returns true if it can be processed now; false if the relay has not yet recorded the acknowledgements of the
   *   deliveries before it.
   */
  async catchUpBefore(message: Message): Promise<boolean> {
    let caughtUp: CatchUpResult | undefined;
    try {
      [caughtUp] = await this.catchUp(message.lane);
    } catch (error) {
      if (!(error instanceof FetchError)) {
        throw error;
      }
      this.#parts.logger.warn(`sequence ${message.sequence} of ${message.lane} is postponed: ${error.message}`);
      throw new Busy("the missing deliveries before it cannot be fetched now", { retryAfterS: UNAVAILABLE_S });
    }
    if (caughtUp !== undefined && caughtUp.failed !== null) {
      throw new Busy(`sequence ${caughtUp.failed} of its lane cannot be processed`);
    }
    // The relay writes acknowledgements in groups: the newest may not be durable yet.
    return caughtUp !== undefined && caughtUp.acknowledged >= message.previousSequence;
  }

  async #catchUpLane(
    source: DeliverySource,
    lane: string,
    known: ReadonlyMap<string, StoredLane>,
  ): Promise<CatchUpResult> {
    const state = known.get(lane)?.state ?? NEW_LANE;
    const fetchPage = (after: bigint) => source.page(lane, after);
    const { inbox, transactions, reports } = this.#parts;
    const process = (request: ReceiverRequest) => this.#processFetched(request);
    const record = (gaps: LaneGaps) => transactions.run((tx) => inbox.recordGaps(tx, lane, gaps));
    const result = await catchUpLane(lane, state, fetchPage, process, record);
    reports.caughtUp(result);
    return result;
  }

  /** Process a fetched delivery; missing ones before it were already requested. */
  async #processFetched(request: ReceiverRequest): Promise<FetchedOutcome> {
    const message = this.#readFetched(request);
    let result: DeliveryResult;
    try {
      result = await this.#parts.process(message);
    } catch (error) {
      // A new version of the receiver may have the handler, or read the payload.
      if (error instanceof UnhandledType || error instanceof UnreadablePayload) {
        return "retryable";
      }
      // The sender has already recorded it as delivered: it will not retry.
      return this.#parts.failed(error, message.deliveryId).outcome === "refused" ? "refused" : "retryable";
    }
    this.#parts.reports.deliveryCommitted(message, result);
    this.#parts.reports.deliveryFetched(result);
    return result.outcome === "conflict" ? "refused" : "processed";
  }

  #readFetched(request: ReceiverRequest): Message {
    const verified = this.#parts.read(request);
    if ("status" in verified) {
      throw new FetchError(`the relay's response is refused: ${verified.text}`);
    }
    const [message, ...more] = verified.messages;
    if (message === undefined || more.length > 0) {
      throw new FetchError("the relay's response is not one delivery");
    }
    return message;
  }

  #requireFetch(): DeliverySource {
    if (this.#parts.source === null) {
      throw new UsageError("fetch: the receiver needs fetch: new FetchClient(url, token)");
    }
    return this.#parts.source;
  }
}
