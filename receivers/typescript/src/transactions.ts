/** The transactions of a receiver: processing deliveries, and the maintenance of the inbox. */

import { HandlerFailed, callHandler, type HandlerRegistry } from "./handlers.js";
import { EXPIRE_ROWS, type Inbox } from "./inbox/inbox.js";
import { foreignDeliveryId, type DeliveryResult } from "./inbox/process.js";
import type { DatabaseCondition, RequestRow, Store } from "./inbox/store.js";
import type { Message } from "./message.js";
import type { ForeignHandler } from "./receiver-options.js";
import type { Logger } from "./reporting.js";
import type { Verified } from "./verification.js";

/** Deliveries between two deletions of expired rows, and transactions of one deletion. */
const [EXPIRE_EVERY, EXPIRE_STEPS_MAX] = [1000, 20];

/** Rolls back: deliveries before it are missing, or one of a batch conflicts. */
export class NotRecorded extends Error {}

/** Runs the transactions of a receiver. */
export class ReceiverTransactions<Tx> {
  readonly #store: Store<Tx>;
  readonly #inbox: Inbox<Tx>;
  readonly #handlers: HandlerRegistry<Tx>;
  readonly #log: Logger;
  #ready: Promise<void> | null = null;
  #received = 0;

  constructor(store: Store<Tx>, inbox: Inbox<Tx>, handlers: HandlerRegistry<Tx>, log: Logger) {
    this.#store = store;
    this.#inbox = inbox;
    this.#handlers = handlers;
    this.#log = log;
  }

  /** Run work of the inbox in a transaction. */
  run<T>(work: (tx: Tx) => Promise<T>): Promise<T> {
    return this.#store.transaction(work);
  }

  /** The condition of the database that an error reports; null for any other error. */
  conditionOf(error: unknown): DatabaseCondition | null {
    return error instanceof HandlerFailed ? null : this.#store.conditionOf(error);
  }

  /** Create the missing tables, once. */
  async createTables(): Promise<void> {
    this.#ready ??= this.run((tx) => this.#inbox.create(tx));
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

  /**
   * Record and process deliveries in one transaction.
   *
   * @param gaps also when deliveries before them are missing.
   * @throws NotRecorded deliveries before them are missing, or one of several conflicts.
   */
  process(messages: readonly Message[], gaps: boolean): Promise<DeliveryResult[]> {
    return this.run(async (tx) => {
      const recorded: DeliveryResult[] = [];
      let firstFresh: Message | null = null;
      for (const message of messages) {
        const result = await this.#inbox.receive(tx, message, { gaps });
        if (result.outcome === "early" || (result.outcome === "conflict" && messages.length > 1)) {
          throw new NotRecorded();
        }
        recorded.push(result);
        if (result.outcome === "fresh") {
          firstFresh ??= message;
          for (const handler of this.#handlers.matching(message.type)) {
            await callHandler(() => handler(message, tx));
          }
        }
      }
      if (firstFresh !== null) {
        // The first one: a handler of any later one may have rolled it back.
        await this.#inbox.confirm(tx, firstFresh.deliveryId);
      }
      return recorded;
    });
  }

  /** Record and process a request of another sender. */
  processForeign(verified: Verified, body: Uint8Array, handler: ForeignHandler<Tx>): Promise<DeliveryResult> {
    return this.run(async (tx) => {
      const result = await this.#inbox.receiveForeign(tx, verified.messageId);
      if (result.outcome === "fresh") {
        await callHandler(() => handler(verified, body, tx));
        await this.#inbox.confirm(tx, foreignDeliveryId(verified.messageId));
      }
      return result;
    });
  }

  /** Count received deliveries; delete expired rows after the first ones and then every 1,000. */
  async expireSometimes(received: number): Promise<void> {
    const before = this.#received;
    this.#received += received;
    if (before !== 0 && Math.floor(before / EXPIRE_EVERY) === Math.floor(this.#received / EXPIRE_EVERY)) {
      return;
    }
    try {
      for (let step = 0; step < EXPIRE_STEPS_MAX; step++) {
        if ((await this.run((tx) => this.#inbox.expire(tx))) < EXPIRE_ROWS) {
          break;
        }
      }
    } catch (error) {
      // The delivery is committed; expired rows are deleted at a later attempt.
      this.#log.error("expired rows were not deleted", error);
    }
  }

  /** Insert a row into the table of requests; an error is only logged. */
  async logRequest(row: RequestRow): Promise<void> {
    try {
      await this.run((tx) => this.#inbox.log(tx, row));
    } catch (error) {
      this.#log.error("a request was not logged", error);
    }
  }
}
