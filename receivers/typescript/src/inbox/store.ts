/**
 * The interface between the inbox and its database.
 *
 * A store opens transactions, and runs the statements of an inbox in them. `MemoryStore` and `PgStore` implement it; an
 * application can implement it for another driver of PostgreSQL.
 */

import type { LaneState } from "../lane-order.js";

/** What identifies a recorded delivery. Lane and sequence are null for requests of other senders. */
export interface Claim {
  readonly deliveryId: string;
  readonly lane: string | null;
  readonly sequence: bigint | null;
}

/** A row of the lane table. */
export interface StoredLane {
  readonly lane: string;
  readonly state: LaneState;
  /** Deliveries up to this number may have expired. */
  readonly forgotten: bigint;
}

/** A row for the table of the newest events. */
export interface LatestEvent {
  readonly key: string;
  readonly deliveryId: string;
  /** Empty for a replay or a backfill, whose number does not reflect the age of its event. */
  readonly lane: string;
  readonly sequence: bigint;
  /** RFC 3339. */
  readonly publishedAt: string;
}

/** A row for the table of requests. */
export interface RequestRow {
  readonly deliveryId: string;
  readonly lane: string | null;
  readonly sequence: bigint | null;
  readonly type: string | null;
  readonly attempt: number | null;
  readonly outcome: string;
  readonly status: number;
  readonly reason: string;
}

/** The statements of an inbox in one transaction. */
export interface InboxStatements {
  /**
   * How long processed delivery ids are kept. False: shorter than the inbox's retention, so a number that the lane has
   * forgotten proves nothing about its delivery id.
   */
  readonly keepsRetention: boolean;
  /** Create the missing tables; needs no privilege to create tables if all exist. */
  createTables(): Promise<void>;
  /**
   * Fast path in one statement: the next number of a lane without missing numbers, and a new delivery id. Null: the
   * store has no such statement.
   */
  advance(claim: Claim): Promise<{ moved: boolean; claimed: boolean } | null>;
  /** Whether this delivery id is recorded. Fails in a failed transaction. */
  confirm(deliveryId: string): Promise<boolean>;
  addLane(lane: string): Promise<void>;
  /** Lock lanes in the byte order of their names, the global lock order. */
  lockLanes(lane: string, replayed: string): Promise<StoredLane[]>;
  /** All lanes, not locked. */
  lanes(): Promise<StoredLane[]>;
  saveLane(lane: string, state: LaneState): Promise<void>;
  /** Record a delivery id; false: it is recorded already. Waits for a concurrent insert of it. */
  claim(claim: Claim): Promise<boolean>;
  unclaim(deliveryId: string): Promise<void>;
  /** Record the newest event of a key; false: a newer one is recorded. */
  latest(event: LatestEvent): Promise<boolean>;
  /** Select and lock up to `rows` deliveries received more than `keepS` seconds ago. */
  lockExpired(keepS: number, rows: number): Promise<Claim[]>;
  /** Record up to which number of a lane deliveries may have expired. */
  forget(lane: string, sequence: bigint): Promise<void>;
  deleteDeliveries(deliveryIds: readonly string[]): Promise<void>;
  /** Delete up to `rows` requests logged more than `keepS` seconds ago. */
  deleteRequests(keepS: number, rows: number): Promise<void>;
  logRequest(row: RequestRow): Promise<void>;
}

/** A condition of a database that may end without a change of the program. */
export type DatabaseCondition = "unavailable" | "busy";

/**
 * A database of an inbox.
 *
 * @typeParam Tx what handlers get to write their effects in the transaction, such as a `PoolClient` of `pg`.
 */
export interface Store<Tx> {
  /**
   * Open a transaction, commit it after `work`, roll it back if `work` fails.
   *
   * @throws the error of `work`, or an error if the database did not commit.
   */
  transaction<T>(work: (tx: Tx) => Promise<T>): Promise<T>;
  /** The statements of an inbox in an open transaction. */
  statements(tx: Tx): InboxStatements;
  /** The condition of the database that an error reports; null for any other error. */
  conditionOf(error: unknown): DatabaseCondition | null;
}
