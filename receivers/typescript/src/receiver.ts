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

import { catchUpLane, lanesBehind, type CatchUpResult, type FetchedOutcome } from "./catch-up.js";
import type { LaneMark } from "./checkpoint.js";
import { Busy, FetchError, MessageError, OutboxError, Refuse, SignatureError, UsageError } from "./errors.js";
import type { DeliverySource } from "./fetch-client.js";
import { EXPIRE_ROWS, Inbox, type InboxOptions } from "./inbox/inbox.js";
import { foreignDeliveryId, type DeliveryResult } from "./inbox/process.js";
import type { DatabaseCondition, Store, StoredLane } from "./inbox/store.js";
import { NEW_LANE } from "./lane-order.js";
import type { Message } from "./message.js";
import { parsePattern } from "./pattern.js";
import { ReorderBuffer } from "./reorder-buffer.js";
import {
  ReceiverReports,
  consoleLogger,
  requestRow,
  type DeliveryListener,
  type Logger,
  type ReceiverTotals,
} from "./reporting.js";
import {
  BODY_BYTES_MAX,
  notPost,
  putOff,
  rejected,
  responseOf,
  tooLarge,
  type ReceiverRequest,
  type ReceiverResponse,
} from "./requests.js";
import { errorText } from "./text.js";
import { Verifier, type Verified, type VerifierOptions } from "./verification.js";

const IN_FLIGHT_MAX = 100;
const HELD_MAX = 1000;
const HOLD_S = 5;
/** Poll interval of a held request: another process may have received the missing delivery. */
const POLL_MS = 250;
/** Retry-After while the database is unavailable, and while it is busy. */
const [UNAVAILABLE_S, BUSY_S] = [5, 1];
/** Deliveries between two deletions of expired rows, and transactions of one deletion. */
const [EXPIRE_EVERY, EXPIRE_STEPS_MAX] = [1000, 20];
const UNHANDLED_TYPES_MAX = 1000;
const NOT_FETCHABLE_YET = "deliveries acknowledged a moment ago cannot be fetched yet";

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

/** Options of a receiver. */
export interface ReceiverOptions extends VerifierOptions {
  /** Retention and order options of the inbox. */
  readonly inbox?: InboxOptions;
  /** Where missing deliveries and payloads are fetched, a `FetchClient`; none by default. */
  readonly fetch?: DeliverySource | null;
  /** Policy for a delivery when deliveries before it are missing; `report` by default. */
  readonly gaps?: GapPolicy;
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

/** Rolls back: deliveries before it are missing, or one of a batch conflicts. */
class NotRecorded extends Error {}

/** A handler failed with an error of the system, of its own I/O: drivers throw the same errors for the database. */
class HandlerFailed extends OutboxError {}

/**
 * Receiver: idempotent, ordered processing of deliveries.
 *
 * @typeParam Tx what handlers get to write their effects, see `Store`.
 */
export class Receiver<Tx> {
  /** The inbox, for `isNewest` in handlers. */
  readonly inbox: Inbox<Tx>;
  /** Largest request body accepted, in bytes. */
  readonly bodyBytesMax: number;
  /** Where the receiver logs. */
  readonly logger: Logger;
  readonly #store: Store<Tx>;
  readonly #verifier: Verifier;
  readonly #reports: ReceiverReports;
  readonly #fetch: DeliverySource | null;
  readonly #gaps: GapPolicy;
  readonly #holdMs: number;
  readonly #reorderBuffer: ReorderBuffer;
  readonly #logRequests: boolean;
  readonly #inFlightMax: number;
  readonly #handlers: { pattern: RegExp; handler: Handler<Tx> }[] = [];
  readonly #unhandledTypes = new Set<string>();
  /** Lanes being caught up because of a checkpoint; it can outlast the sender's time-out. */
  readonly #fetching = new Set<string>();
  #foreignHandler: ForeignHandler<Tx> | null = null;
  #ready: Promise<void> | null = null;
  #inFlight = 0;
  #received = 0;

  /**
   * @param secrets the endpoint's secret, `whsec_…`, or public key, `whpk_…`; several while one is being rotated.
   * @param store the database of the effects: `PgStore`, or `MemoryStore`.
   * @throws UsageError an argument is out of range.
   */
  constructor(secrets: string | readonly string[], store: Store<Tx>, options: ReceiverOptions = {}) {
    this.bodyBytesMax = atLeastOne("bodyBytesMax", options.bodyBytesMax ?? BODY_BYTES_MAX);
    this.#inFlightMax = atLeastOne("inFlightMax", options.inFlightMax ?? IN_FLIGHT_MAX);
    this.#gaps = options.gaps ?? "report";
    if (!["report", "hold", "catch_up"].includes(this.#gaps)) {
      throw new UsageError(`gaps: must be one of report, hold, catch_up, not ${JSON.stringify(this.#gaps)}`);
    }
    this.#fetch = options.fetch ?? null;
    if (this.#gaps === "catch_up" && this.#fetch === null) {
      throw new UsageError("fetch: the policy catch_up needs fetch: new FetchClient(url, token)");
    }
    this.logger = options.logger ?? consoleLogger;
    this.inbox = new Inbox(store, options.inbox);
    this.#store = store;
    this.#verifier = new Verifier(secrets, options);
    this.#reports = new ReceiverReports(this.logger, options.onDelivery ?? null);
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
   * @throws UsageError the pattern is invalid.
   */
  on(pattern: string, handler: Handler<Tx>): this {
    this.#handlers.push({ pattern: parsePattern(pattern), handler });
    return this;
  }

  /**
   * Register a handler for requests of other Standard Webhooks senders. They have no lanes, so they are deduplicated by
   * `webhook-id` but not checked for order. Without a handler they get 400.
   */
  onForeign(handler: ForeignHandler<Tx>): this {
    this.#foreignHandler = handler;
    return this;
  }

  /** Create the missing tables; otherwise the first request does so. */
  async start(): Promise<void> {
    await this.#createTables();
  }

  /** Process a request and return its response; never throws. */
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
          await this.#logRequest(verified, response);
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
  async catchUp(lane?: string): Promise<CatchUpResult[]> {
    const source = this.#requireFetch();
    await this.#createTables();
    const known = await this.#store.transaction((tx) => this.inbox.lanes(tx));
    const lanes = lane !== undefined ? [lane] : lanesBehind(known, await source.lanes());
    const results: CatchUpResult[] = [];
    for (const each of lanes) {
      results.push(await this.#catchUpLane(source, each, known));
    }
    return results;
  }

  /**
   * Fetch the payload of a thin message, also while its handler runs.
   *
   * @returns parsed JSON, or bytes if the message has a content type.
   * @throws FetchError the relay cannot be reached, rejected the request, or has erased the event.
   * @throws UsageError the receiver was created without `fetch`.
   */
  async fetchPayload(message: Message): Promise<unknown> {
    const item = await this.#requireFetch().delivery(message.lane, message.sequence);
    if (item.request === null) {
      throw new FetchError(`the event of delivery ${message.deliveryId} was erased`);
    }
    const found = this.#readFetched(item.request);
    if (found.deliveryId !== message.deliveryId) {
      throw new FetchError(`the relay returned another delivery than ${message.deliveryId}`);
    }
    return found.data;
  }

  // ------------------------------------------------------------------------------------------------------- requests

  /** Verify a request; returns the 4xx response that rejects it, if it is invalid. */
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
        return rejected(401, error.message);
      }
      if (error instanceof MessageError) {
        return rejected(400, error.message);
      }
      throw error;
    }
    if (verified.messages.length === 0 && verified.checkpoint === null && this.#foreignHandler === null) {
      const prefix = this.#verifier.headerPrefixes[0] ?? "";
      return rejected(400, `the headers ${prefix}Lane and ${prefix}Sequence are missing`);
    }
    return verified;
  }

  async #respond(verified: Verified, body: Uint8Array): Promise<ReceiverResponse> {
    let response: ReceiverResponse;
    try {
      await this.#createTables();
      if (verified.checkpoint !== null) {
        return await this.#compare(verified.checkpoint);
      }
      response =
        verified.messages.length > 0
          ? await this.#receiveMessages(verified.messages)
          : responseTo(await this.#receiveForeign(verified, body));
    } catch (error) {
      return this.#failed(error, verified.messageId);
    }
    if (this.#isTimeToExpire(Math.max(verified.messages.length, 1))) {
      await this.#expire();
    }
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
          if (await this.#catchUpBefore(message)) {
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

  async #processOne(message: Message, gaps: boolean): Promise<DeliveryResult> {
    const [result] = await this.#process([message], gaps);
    if (result === undefined) {
      throw new Error("a delivery has no result");
    }
    return result;
  }

  /**
   * Record and process deliveries in one transaction.
   *
   * @param gaps also when deliveries before them are missing.
   * @throws NotRecorded deliveries before them are missing, or one of several conflicts.
   */
  async #process(messages: readonly Message[], gaps: boolean): Promise<DeliveryResult[]> {
    const results = await this.#store.transaction(async (tx) => {
      const recorded: DeliveryResult[] = [];
      let firstFresh: Message | null = null;
      for (const message of messages) {
        const result = await this.inbox.receive(tx, message, { gaps });
        if (result.outcome === "early" || (result.outcome === "conflict" && messages.length > 1)) {
          throw new NotRecorded();
        }
        recorded.push(result);
        if (result.outcome === "fresh") {
          firstFresh ??= message;
          for (const handler of this.#handlersOf(message.type)) {
            await callHandler(() => handler(message, tx));
          }
        }
      }
      if (firstFresh !== null) {
        // The first one: a handler of any later one may have rolled it back.
        await this.inbox.confirm(tx, firstFresh.deliveryId);
      }
      return recorded;
    });
    for (const message of messages) {
      this.#reorderBuffer.received(message.lane, message.sequence);
    }
    return results;
  }

  async #receiveForeign(verified: Verified, body: Uint8Array): Promise<DeliveryResult> {
    return this.#store.transaction(async (tx) => {
      const result = await this.inbox.receiveForeign(tx, verified.messageId);
      const handler = this.#foreignHandler;
      if (result.outcome === "fresh" && handler !== null) {
        await callHandler(() => handler(verified, body, tx));
        await this.inbox.confirm(tx, foreignDeliveryId(verified.messageId));
      }
      return result;
    });
  }

  #handlersOf(type: string): Handler<Tx>[] {
    const handlers = this.#handlers.filter(({ pattern }) => pattern.test(type)).map(({ handler }) => handler);
    if (handlers.length === 0 && !this.#unhandledTypes.has(type) && this.#unhandledTypes.size < UNHANDLED_TYPES_MAX) {
      this.#unhandledTypes.add(type);
      this.logger.warn(`no handler for event type ${JSON.stringify(type)}: its events are recorded, not processed`);
    }
    return handlers;
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

  /** Map the error of a rolled-back request to its response, which never has the message of an unexpected error. */
  #failed(error: unknown, messageId: string): ReceiverResponse {
    if (error instanceof Refuse) {
      return responseOf("refused", 422, error.message);
    }
    if (error instanceof Busy) {
      return putOff(error.message, error.retryAfterS);
    }
    const condition: DatabaseCondition | null =
      error instanceof HandlerFailed ? null : this.#store.conditionOf(error);
    if (condition === "unavailable") {
      this.logger.error("the database is not available", error);
      return putOff("the receiver's database is not available", UNAVAILABLE_S);
    }
    if (condition === "busy") {
      this.logger.warn(`the database is busy: ${messageId} is postponed`, error);
      return putOff("the receiver's database is busy", BUSY_S);
    }
    this.logger.error(`delivery ${messageId} was not processed`, error);
    return responseOf("failed", 500, "the receiver failed");
  }

  // ---------------------------------------------------------------------------------------------------- maintenance

  async #createTables(): Promise<void> {
    this.#ready ??= this.#store.transaction((tx) => this.inbox.create(tx));
    const ready = this.#ready;
    try {
      await ready;
    } catch (error) {
      // The next request tries again.
      if (this.#ready === ready) {
        this.#ready = null;
      }
      throw error;
    }
  }

  /** Count received deliveries; true for the first ones and then every EXPIRE_EVERY. */
  #isTimeToExpire(count: number): boolean {
    const before = this.#received;
    this.#received += count;
    return before === 0 || Math.floor(before / EXPIRE_EVERY) < Math.floor(this.#received / EXPIRE_EVERY);
  }

  async #expire(): Promise<void> {
    try {
      for (let step = 0; step < EXPIRE_STEPS_MAX; step++) {
        if ((await this.#store.transaction((tx) => this.inbox.expire(tx))) < EXPIRE_ROWS) {
          break;
        }
      }
    } catch (error) {
      // The delivery is committed; expired rows are deleted at a later attempt.
      this.logger.error("expired rows were not deleted", error);
    }
  }

  async #logRequest(verified: Verified, response: ReceiverResponse): Promise<void> {
    try {
      await this.#store.transaction((tx) => this.inbox.log(tx, requestRow(verified, response)));
    } catch (error) {
      this.logger.error("a request was not logged", error);
    }
  }

  // ------------------------------------------------------------------------------------------------------- catch-up

  /** Compare a checkpoint with the inbox; with the policy `catch_up`, fetch what is missing. */
  async #compare(marks: readonly LaneMark[]): Promise<ReceiverResponse> {
    const compared = await this.#store.transaction((tx) => this.inbox.compare(tx, marks));
    const fetches = this.#gaps === "catch_up";
    this.#reports.checkpointCompared(compared, fetches);
    for (const lane of fetches ? compared.missing.keys() : []) {
      if (this.#fetching.has(lane)) {
        continue;
      }
      this.#fetching.add(lane);
      try {
        await this.catchUp(lane);
      } catch (error) {
        if (!(error instanceof FetchError)) {
          throw error;
        }
        // The next checkpoint reveals the same missing numbers.
        this.logger.error(`lane ${lane}: missing deliveries cannot be fetched now: ${error.message}`);
      } finally {
        this.#fetching.delete(lane);
      }
    }
    return responseOf("compared", 200, compared.missing.size > 0 ? "deliveries are missing" : "no delivery is missing");
  }

  async #catchUpLane(
    source: DeliverySource,
    lane: string,
    known: ReadonlyMap<string, StoredLane>,
  ): Promise<CatchUpResult> {
    const state = known.get(lane)?.state ?? NEW_LANE;
    const fetchPage = (after: bigint) => source.page(lane, after);
    let result = await catchUpLane(lane, state, fetchPage, (request) => this.#processFetched(request));
    if (result.unavailable.length > 0) {
      const { unavailable } = result;
      const marked = await this.#store.transaction((tx) => this.inbox.markUnavailable(tx, lane, unavailable));
      result = { ...result, unavailable: marked };
    }
    this.#reports.caughtUp(result);
    return result;
  }

  /** Process a fetched delivery; missing ones before it were already requested. */
  async #processFetched(request: ReceiverRequest): Promise<FetchedOutcome> {
    const message = this.#readFetched(request);
    let result: DeliveryResult;
    try {
      result = await this.#processOne(message, true);
    } catch (error) {
      // The sender has already recorded it as delivered: it will not retry.
      return this.#failed(error, message.deliveryId).outcome === "refused" ? "refused" : "retryable";
    }
    this.#reports.deliveryCommitted(message, result);
    this.#reports.deliveryFetched(result);
    return result.outcome === "conflict" ? "refused" : "processed";
  }

  #readFetched(request: ReceiverRequest): Message {
    const verified = this.#read(request, true);
    if ("status" in verified) {
      throw new FetchError(`the relay's response is refused: ${verified.text}`);
    }
    const [message, ...more] = verified.messages;
    if (message === undefined || more.length > 0) {
      throw new FetchError("the relay's response is not one delivery");
    }
    return message;
  }

  /**
   * Fetch the missing deliveries before this one.
   *
   * @returns true if it can be processed now; false if the relay has not yet recorded the acknowledgements of the
   *   deliveries before it.
   */
  async #catchUpBefore(message: Message): Promise<boolean> {
    let caughtUp: CatchUpResult | undefined;
    try {
      [caughtUp] = await this.catchUp(message.lane);
    } catch (error) {
      if (!(error instanceof FetchError)) {
        throw error;
      }
      this.logger.warn(`sequence ${message.sequence} of ${message.lane} is postponed: ${errorText(error)}`);
      throw new Busy("the missing deliveries before it cannot be fetched now", { retryAfterS: UNAVAILABLE_S });
    }
    if (caughtUp !== undefined && caughtUp.failed !== null) {
      throw new Busy(`sequence ${caughtUp.failed} of its lane cannot be processed`);
    }
    // The relay writes acknowledgements in groups: the newest may not be durable yet.
    return caughtUp !== undefined && caughtUp.acknowledged >= message.previousSequence;
  }

  #requireFetch(): DeliverySource {
    if (this.#fetch === null) {
      throw new UsageError("fetch: the receiver needs fetch: new FetchClient(url, token)");
    }
    return this.#fetch;
  }
}

/** The response to one committed delivery; without a message it is a request of another sender. */
function responseTo(result: DeliveryResult, message?: Message): ReceiverResponse {
  if (result.outcome === "conflict" && message !== undefined) {
    // Not 409: receivers use it for a duplicate that they already have.
    return responseOf("conflict", 422, `sequence ${message.sequence} of ${message.lane} was used by another delivery`);
  }
  return result.outcome === "fresh"
    ? responseOf("processed", 200, "processed")
    : responseOf("duplicate", 200, "processed before");
}

/**
 * The response to a batch that stopped at one of its messages: with X-Accepted-Through if messages before it were
 * committed.
 */
function partialResponse(messages: readonly Message[], at: number, response: ReceiverResponse): ReceiverResponse {
  const before = messages[at - 1];
  if (before === undefined) {
    return response;
  }
  return { ...response, headers: { ...response.headers, "X-Accepted-Through": before.sequence.toString() } };
}

/** Call a handler; a system error becomes HandlerFailed. */
async function callHandler(call: () => void | Promise<void>): Promise<void> {
  try {
    await call();
  } catch (error) {
    if (error instanceof Error && "syscall" in error) {
      throw new HandlerFailed("the handler's own I/O failed", { cause: error });
    }
    throw error;
  }
}

function atLeastOne(name: string, value: number): number {
  if (!(Number.isInteger(value) && value >= 1)) {
    throw new UsageError(`${name}: must be an integer of 1 or more, not ${value}`);
  }
  return value;
}
