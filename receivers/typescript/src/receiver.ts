/**
 * `Receiver`: the pipeline of a request.
 *
 * 1. verify the signature, and that headers and body agree;
 * 2. open a transaction and record the delivery: lock its lane, look up and insert its sequence number and its id;
 * 3. if it is new, run the handlers in the same transaction;
 * 4. commit, and only then respond 2xx.
 *
 * An error before the commit rolls everything back, and the sender retries.
 *
 * The deliveries of a batch are processed in one transaction. If one fails, the transaction is rolled back and each
 * delivery is processed in its own transaction, up to the one that fails; X-Accepted-Through reports how far that got.
 * A batch that contains a replay from another lane is always processed one by one: it also locks that lane, and the
 * global lock order holds only if the transaction has no lock yet.
 */

import type { CatchUpResult } from "./catch-up.js";
import { Busy, MessageError, SignatureError, UsageError } from "./errors.js";
import { HandlerRegistry, requireForeignHandler } from "./handlers.js";
import { Inbox } from "./inbox/inbox.js";
import type { DeliveryResult } from "./inbox/process.js";
import type { Store } from "./inbox/store.js";
import type { Message } from "./message.js";
import { ReceiverCatchUp } from "./receiver-catch-up.js";
import type { ForeignHandler, GapPolicy, Handler, HttpReceiver, ReceiverOptions } from "./receiver-options.js";
import { ReorderBuffer } from "./reorder-buffer.js";
import { ReceiverReports, consoleLogger, requestRow, type Logger, type ReceiverTotals } from "./reporting.js";
import {
  BODY_BYTES_MAX,
  notPost,
  putOff,
  rejected,
  unverified,
  responseOf,
  tooLarge,
  type ReceiverRequest,
  type ReceiverResponse,
} from "./requests.js";
import { BUSY_S, partialResponse, responseTo, responseToError } from "./responses.js";
import { NotRecorded, ReceiverTransactions } from "./transactions.js";
import { Verifier, type Verified } from "./verification.js";

const IN_FLIGHT_MAX = 100;
const HELD_MAX = 1000;
const HOLD_S = 5;
/** Poll interval of a held request: another process may have received the missing delivery. */
const POLL_MS = 250;
const NOT_FETCHABLE_YET = "deliveries acknowledged a moment ago cannot be fetched yet";

/**
 * Receiver: idempotent, ordered processing of deliveries.
 *
 * @typeParam Tx what handlers get to write their effects, see `Store`.
 */
export class Receiver<Tx> implements HttpReceiver {
  /** The inbox, for `isNewest` in handlers. */
  readonly inbox: Inbox<Tx>;
  /** Largest request body accepted, in bytes. */
  readonly bodyBytesMax: number;
  /** Where the receiver logs. */
  readonly logger: Logger;
  readonly #transactions: ReceiverTransactions<Tx>;
  readonly #verifier: Verifier;
  readonly #reports: ReceiverReports;
  readonly #catchUp: ReceiverCatchUp<Tx>;
  readonly #gaps: GapPolicy;
  readonly #holdMs: number;
  readonly #reorderBuffer: ReorderBuffer;
  readonly #logRequests: boolean;
  readonly #inFlightMax: number;
  readonly #handlers: HandlerRegistry<Tx>;
  #foreignHandler: ForeignHandler<Tx> | null = null;
  #inFlight = 0;

  /**
   * @param secrets the endpoint's secret, `whsec_…`, or public key, `whpk_…`; several while one is being rotated.
   * @param store the database of the effects: `PgStore`, or `MemoryStore`.
   * @throws UsageError an argument is out of range.
   */
  constructor(secrets: string | readonly string[], store: Store<Tx>, options: ReceiverOptions = {}) {
    if (typeof store !== "object" || store === null) {
      throw new UsageError("store: must be a store, such as new PgStore(new pg.Pool({ connectionString: address }))");
    }
    this.bodyBytesMax = atLeastOne("bodyBytesMax", options.bodyBytesMax ?? BODY_BYTES_MAX);
    this.#inFlightMax = atLeastOne("inFlightMax", options.inFlightMax ?? IN_FLIGHT_MAX);
    this.#gaps = options.gaps ?? "report";
    if (!["report", "hold", "catch_up"].includes(this.#gaps)) {
      throw new UsageError(`gaps: must be one of report, hold, catch_up, not ${JSON.stringify(this.#gaps)}`);
    }
    const source = options.fetch ?? null;
    if (this.#gaps === "catch_up" && source === null) {
      throw new UsageError("fetch: the policy catch_up needs fetch: new FetchClient(url, token)");
    }
    this.logger = options.logger ?? consoleLogger;
    this.inbox = new Inbox(store, options.inbox);
    this.#handlers = new HandlerRegistry(options.unhandled ?? "refuse");
    this.#transactions = new ReceiverTransactions(store, this.inbox, this.#handlers, this.logger);
    this.#verifier = new Verifier(secrets, options);
    this.#reports = new ReceiverReports(this.logger, options.onDelivery ?? null);
    this.#catchUp = new ReceiverCatchUp({
      source,
      inbox: this.inbox,
      transactions: this.#transactions,
      reports: this.#reports,
      logger: this.logger,
      read: (request) => this.#read(request, true),
      process: (message) => this.#processOne(message, true),
      failed: (error, messageId) => this.#failed(error, messageId),
    });
    this.#holdMs = (options.holdS ?? HOLD_S) * 1000;
    this.#reorderBuffer = new ReorderBuffer(options.heldMax ?? HELD_MAX);
    this.#logRequests = options.logRequests ?? false;
  }

  /** Counters since the receiver was created. */
  get totals(): ReceiverTotals {
    return this.#reports.totals;
  }

  /**
   * Register a handler for event types: `order.paid`, `order.*`, `**`. Several handlers of a type are called in the
   * order of their registration.
   *
   * @param pattern dot-separated; `*` is one segment, a last `**` one or more.
   * @throws UsageError the pattern is invalid, or the handler cannot be called.
   */
  on(pattern: string, handler: Handler<Tx>): this {
    this.#handlers.add(pattern, handler);
    return this;
  }

  /**
   * Register a handler for requests of other Standard Webhooks senders. They have no lanes, so they are deduplicated by
   * `webhook-id` but not checked for order. Without a handler they get 400.
   */
  onForeign(handler: ForeignHandler<Tx>): this {
    requireForeignHandler(handler);
    this.#foreignHandler = handler;
    return this;
  }

  /** Create the missing tables; otherwise the first request does so. */
  async start(): Promise<void> {
    await this.#transactions.createTables();
  }

  /** Process a request and return its response; never rejects. */
  async handle(request: ReceiverRequest): Promise<ReceiverResponse> {
    if (this.#inFlight >= this.#inFlightMax) {
      this.#reports.requestEnded("put_off");
      return putOff(`${this.#inFlight} requests are being processed`, BUSY_S);
    }
    this.#inFlight++;
    let response = responseOf("failed", 500, "the receiver failed");
    try {
      const verified = this.#read(request, false);
      if ("status" in verified) {
        response = verified;
      } else {
        response = await this.#respond(verified, request.body);
        if (this.#logRequests) {
          await this.#transactions.logRequest(requestRow(verified, response));
        }
      }
    } catch (error) {
      this.logger.error("a request was not processed", error);
    } finally {
      this.#inFlight--;
      this.#reports.requestEnded(response.outcome);
    }
    return response;
  }

  /**
   * Fetch and process the missing deliveries of one lane, or of all lanes.
   *
   * Call it when a receiver starts, especially after a restore from a backup. Fetched deliveries are processed in order
   * and once, also while new ones arrive. It does nothing for a receiver whose inbox is empty.
   *
   * @param lane its name; by default all lanes that are behind.
   * @returns one result per lane that was behind.
   * @throws FetchError the relay cannot be reached, or rejected the request.
   * @throws UsageError the receiver was created without `fetch`.
   */
  catchUp(lane?: string): Promise<CatchUpResult[]> {
    return this.#catchUp.catchUp(lane);
  }

  /**
   * Fetch the payload of a thin message, also while its handler runs.
   *
   * @returns parsed JSON, or bytes if the message has a content type.
   * @throws FetchError the relay cannot be reached, rejected the request, or has erased the event.
   * @throws UsageError the receiver was created without `fetch`.
   */
  fetchPayload(message: Message): Promise<unknown> {
    return this.#catchUp.fetchPayload(message);
  }

  // ------------------------------------------------------------------------------------------------------- requests

  /** Verify a request; returns the response that rejects it, if it is invalid. */
  #read(request: ReceiverRequest, fetched: boolean): Verified | ReceiverResponse {
    if (request.method !== "POST") {
      return notPost();
    }
    if (request.body.length > this.bodyBytesMax) {
      return tooLarge(this.bodyBytesMax);
    }
    let verified: Verified;
    try {
      verified = this.#verifier.verify(request, { fetched });
    } catch (error) {
      if (error instanceof SignatureError) {
        return unverified(error);
      }
      if (error instanceof MessageError) {
        return rejected(400, error.message);
      }
      throw error;
    }
    if (verified.messages.length === 0 && this.#foreignHandler === null) {
      const prefix = this.#verifier.headerPrefixes[0] ?? "";
      return rejected(400, `the headers ${prefix}Lane and ${prefix}Sequence are missing`);
    }
    return verified;
  }

  async #respond(verified: Verified, body: Uint8Array): Promise<ReceiverResponse> {
    let response: ReceiverResponse;
    try {
      await this.#transactions.createTables();
      response =
        verified.messages.length > 0
          ? await this.#receiveMessages(verified.messages)
          : responseTo(await this.#transactions.processForeign(verified, body, this.#requireForeignHandler()));
    } catch (error) {
      return this.#failed(error, verified.messageId);
    }
    await this.#transactions.expireSometimes(Math.max(verified.messages.length, 1));
    return response;
  }

  /** Process messages in one transaction, or else each in its own transaction. */
  async #receiveMessages(messages: readonly Message[]): Promise<ReceiverResponse> {
    if (messages.length > 1 && messages.every(({ replayOf, lane }) => replayOf === null || replayOf.lane === lane)) {
      // An error is not logged: the failing delivery is found by processing each one alone.
      const together = await this.#process(messages, this.#gaps === "report").catch(() => null);
      if (together !== null) {
        return this.#committed(messages, together);
      }
    }
    const results: DeliveryResult[] = [];
    for (const [n, message] of messages.entries()) {
      try {
        const result = await this.#receive(message);
        results.push(result);
        if (result.outcome === "conflict") {
          break;
        }
      } catch (error) {
        const response = this.#failed(error, message.deliveryId);
        this.#committed(messages, results);
        return partialResponse(messages, n, response);
      }
    }
    return this.#committed(messages, results);
  }

  /** Process a delivery, after the missing ones before it if the policy requires it. */
  async #receive(message: Message): Promise<DeliveryResult> {
    if (this.#gaps === "report") {
      return this.#processOne(message, true);
    }
    const endsAt = Date.now() + this.#holdMs;
    for (;;) {
      const registration = this.#reorderBuffer.register(message.lane, message.previousSequence);
      try {
        const tooLate = this.#gaps === "hold" && Date.now() >= endsAt;
        return await this.#processOne(message, tooLate);
      } catch (error) {
        if (!(error instanceof NotRecorded)) {
          throw error;
        }
        if (this.#gaps === "catch_up") {
          if (await this.#catchUp.catchUpBefore(message)) {
            return await this.#processOne(message, true);
          }
          if (Date.now() >= endsAt) {
            throw new Busy(NOT_FETCHABLE_YET);
          }
        }
        // A held request does not count as in flight: it uses no connection while it waits.
        this.#inFlight--;
        try {
          await registration.wait(Math.min(endsAt - Date.now(), POLL_MS));
        } finally {
          this.#inFlight++;
        }
      } finally {
        registration.release();
      }
    }
  }

  /** Process deliveries in one transaction, and wake the requests that wait for them. */
  async #process(messages: readonly Message[], gaps: boolean): Promise<DeliveryResult[]> {
    const results = await this.#transactions.process(messages, gaps);
    for (const { lane, sequence } of messages) {
      this.#reorderBuffer.received(lane, sequence);
    }
    return results;
  }

  async #processOne(message: Message, gaps: boolean): Promise<DeliveryResult> {
    const [result] = await this.#process([message], gaps);
    if (result === undefined) {
      throw new Error("a delivery has no result");
    }
    return result;
  }

  /**
   * Report the committed deliveries of a request; returns its response.
   *
   * @param results of the first messages; the remaining ones were not processed.
   */
  #committed(messages: readonly Message[], results: readonly DeliveryResult[]): ReceiverResponse {
    let response = responseOf("duplicate", 200, "processed before");
    for (const [n, result] of results.entries()) {
      const message = messages[n];
      if (message === undefined) {
        break;
      }
      this.#reports.deliveryCommitted(message, result);
      const current = responseTo(result, message);
      if (current.status >= 400) {
        return partialResponse(messages, n, current);
      }
      if (current.outcome === "processed") {
        response = current;
      }
    }
    return response;
  }

  #failed(error: unknown, messageId: string): ReceiverResponse {
    return responseToError(error, this.#transactions.conditionOf(error), messageId, this.logger);
  }

  #requireForeignHandler(): ForeignHandler<Tx> {
    if (this.#foreignHandler === null) {
      throw new UsageError("there is no handler for requests of other senders");
    }
    return this.#foreignHandler;
  }
}

function atLeastOne(name: string, value: number): number {
  if (!(Number.isInteger(value) && value >= 1)) {
    throw new UsageError(`${name}: must be an integer of 1 or more, not ${value}`);
  }
  return value;
}
