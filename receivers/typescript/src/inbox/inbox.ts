/**
 * `Inbox`: records received deliveries in the database of their effects.
 *
 *     await store.transaction(async (tx) => {
 *       const result = await inbox.receive(tx, message);
 *       if (result.outcome === "fresh") { … }
 *       await inbox.confirm(tx, message.deliveryId);
 *     });
 *
 * The event is processed if and only if the transaction commits, and then never again. Concurrent copies are
 * serialized by a lock on the row of their lane.
 */

import { UsageError } from "../errors.js";
import type { LaneGaps } from "../lane-order.js";
import type { Message } from "../message.js";
import type { Range } from "../ranges.js";
import { compareBytes, rfc3339 } from "../text.js";
import {
  TOLERANCE,
  receive,
  receiveForeign,
  recordGaps,
  type DeliveryResult,
} from "./process.js";
import type { RequestRow, Store, StoredLane } from "./store.js";

/** Default retention of delivery ids: 7 days, in seconds. */
export const KEEP_S = 7 * 86_400;
/** Rows deleted in one transaction. */
export const EXPIRE_ROWS = 1000;

/** Options of an inbox. */
export interface InboxOptions {
  /** Retention of delivery ids and logged requests in seconds, from a minute to ten years; 7 days by default. */
  readonly keepS?: number;
  /**
   * The inbox is older than every lane, so that numbers before the first one received are missing, not unknown; false
   * by default.
   */
  readonly fromStart?: boolean;
  /** A missing number is overdue once overtaken by more than this many; 20 by default. */
  readonly tolerance?: number;
}

/** Deduplicates deliveries and checks their order. No method begins or ends a transaction. */
export class Inbox<Tx> {
  readonly #store: Store<Tx>;
  readonly #keepS: number;
  /** The inbox is older than every lane. */
  readonly fromStart: boolean;
  readonly #tolerance: number;

  /** @throws UsageError an option is out of range. */
  constructor(store: Store<Tx>, options: InboxOptions = {}) {
    this.#store = store;
    this.#keepS = options.keepS ?? KEEP_S;
    this.fromStart = options.fromStart ?? false;
    this.#tolerance = options.tolerance ?? TOLERANCE;
    if (!(this.#keepS >= 60 && this.#keepS <= 3650 * 86_400)) {
      throw new UsageError(`keepS: must be between a minute and ten years, not ${this.#keepS} s`);
    }
    if (!(Number.isInteger(this.#tolerance) && this.#tolerance >= 0)) {
      throw new UsageError(`tolerance: must be an integer of 0 or more, not ${this.#tolerance}`);
    }
  }

  /**
   * Record a delivery in the current transaction.
   *
   * @param options `gaps`: record it although numbers before it are missing (default); otherwise the outcome is
   *   `early`.
   * @returns the result; process the message if its outcome is `fresh`.
   */
  receive(tx: Tx, message: Message, options: { gaps?: boolean } = {}): Promise<DeliveryResult> {
    return receive(this.#store.statements(tx), message, {
      gaps: options.gaps ?? true,
      fromStart: this.fromStart,
      tolerance: this.#tolerance,
      expiredBefore: rfc3339(Date.now() - this.#keepS * 1000),
    });
  }

  /** Record a request of another Standard Webhooks sender by its `webhook-id`. */
  receiveForeign(tx: Tx, messageId: string): Promise<DeliveryResult> {
    return receiveForeign(this.#store.statements(tx), messageId);
  }

  /**
   * Whether this is the newest event of a key seen so far; records it if so.
   *
   * For effects that replace a state: applied only if this is true, a late or replayed event never overwrites a newer
   * state.
   *
   * @param key identifies the state, such as `customer 7`.
   */
  isNewest(tx: Tx, key: string, message: Message): Promise<boolean> {
    const { deliveryId, timestamp: publishedAt } = message;
    // The number of a replay does not reflect the age of its event: compare by the time of publication instead.
    const isAgain = message.replayOf !== null || message.backfill !== null;
    const [lane, sequence] = isAgain ? ["", 0n] : [message.lane, message.sequence];
    return this.#store.statements(tx).latest({ key, deliveryId, lane, sequence, publishedAt });
  }

  /**
   * Throw if a statement of the transaction has failed, or the delivery was rolled back. Call it last, before the
   * commit: a handler may have caught an error of the database, and PostgreSQL then rolls back at the COMMIT without
   * an error.
   *
   * @param deliveryId of a delivery that the transaction has recorded.
   * @throws UsageError the delivery is not recorded any more.
   */
  async confirm(tx: Tx, deliveryId: string): Promise<void> {
    if (!(await this.#store.statements(tx).confirm(deliveryId))) {
      throw new UsageError("a handler rolled the delivery back; throw Refuse or another error");
    }
  }

  /** Return all lanes of the inbox, by name. */
  async lanes(tx: Tx): Promise<Map<string, StoredLane>> {
    return new Map((await this.#store.statements(tx).lanes()).map((each) => [each.lane, each]));
  }

  /**
   * Record what a catch-up of a lane did not process.
   *
   * @returns the unavailable numbers that were missing until now, also at the end of the lane.
   */
  recordGaps(tx: Tx, lane: string, gaps: LaneGaps): Promise<Range[]> {
    return recordGaps(this.#store.statements(tx), lane, gaps);
  }

  /** Create the missing tables. */
  create(tx: Tx): Promise<void> {
    return this.#store.statements(tx).createTables();
  }

  /**
   * Delete up to 1,000 expired deliveries; returns how many.
   *
   * Call it in a separate transaction: its row locks would otherwise block other receivers until the commit of the
   * effects.
   */
  async expire(tx: Tx): Promise<number> {
    const sql = this.#store.statements(tx);
    // Lock the rows first and delete them last: a locked row still identifies a copy, a deleted one would make the copy
    // wait for this transaction. The lanes are locked in between, in lock order, so that no deadlock is possible.
    const rows = await sql.lockExpired(this.#keepS, EXPIRE_ROWS);
    const last = new Map<string, bigint>();
    for (const { lane, sequence } of rows) {
      if (lane !== null && sequence !== null && sequence > (last.get(lane) ?? -1n)) {
        last.set(lane, sequence);
      }
    }
    for (const [lane, sequence] of [...last].sort((a, b) => compareBytes(a[0], b[0]))) {
      await sql.forget(lane, sequence);
    }
    await sql.deleteDeliveries(rows.map((row) => row.deliveryId));
    await sql.deleteRequests(this.#keepS, EXPIRE_ROWS);
    return rows.length;
  }

  /** Insert one row into the table of requests. */
  log(tx: Tx, row: RequestRow): Promise<void> {
    return this.#store.statements(tx).logRequest(row);
  }
}
