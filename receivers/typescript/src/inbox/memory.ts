/**
 * In-memory store: deduplication within one process, for a limited time window.
 *
 * For idempotent effects, such as invalidating a cache. A restart forgets everything, and effects elsewhere are not in
 * its transaction: after a crash an event may be processed again.
 *
 * The changes of a transaction are visible to others after its commit. It locks lanes, delivery ids and keys
 * (two-phase locking), so that concurrent copies wait for each other.
 */

import { UsageError } from "../errors.js";
import { NEW_LANE, type LaneState } from "../lane-order.js";
import { compareBytes } from "../text.js";
import type { Claim, DatabaseCondition, InboxStatements, LatestEvent, Store, StoredLane } from "./store.js";

const WINDOW_S = 300;
const SEEN_MAX = 1_000_000;
const LANES_MAX = 10_000;
const LATEST_MAX = 1_000_000;
const LOCK_WAIT_MS = 30_000;

interface Seen extends Claim {
  readonly at: number;
}

interface Latest extends LatestEvent {
  /** Time of publication of the newest event that came again, as a replay or a backfill; empty: none. */
  readonly againAt: string;
}

interface Database {
  readonly windowMs: number;
  readonly seen: Map<string, Seen>;
  readonly lanes: Map<string, LaneState>;
  readonly forgotten: Map<string, bigint>;
  readonly latest: Map<string, Latest>;
  readonly locks: Map<string, MemoryTransaction>;
}

/** A lock was not granted within 30 seconds, for example in a deadlock of handlers that call `isNewest`. */
class LockTimeout extends Error {}

/** In-memory store of an inbox. */
export class MemoryStore implements Store<MemoryTransaction> {
  readonly #database: Database;

  /**
   * @param options `windowS`: retention of delivery ids in seconds, 300 by default.
   * @throws UsageError `windowS` is not positive.
   */
  constructor(options: { windowS?: number } = {}) {
    const windowS = options.windowS ?? WINDOW_S;
    if (!(windowS > 0)) {
      throw new UsageError(`windowS: must be more than 0 s, not ${windowS}`);
    }
    this.#database = {
      windowMs: windowS * 1000,
      seen: new Map(),
      lanes: new Map(),
      forgotten: new Map(),
      latest: new Map(),
      locks: new Map(),
    };
  }

  async transaction<T>(work: (tx: MemoryTransaction) => Promise<T>): Promise<T> {
    const tx = new MemoryTransaction(this.#database);
    let committed = false;
    try {
      const result = await work(tx);
      committed = true;
      return result;
    } finally {
      tx.end(committed);
    }
  }

  statements(tx: MemoryTransaction): InboxStatements {
    return tx;
  }

  conditionOf(error: unknown): DatabaseCondition | null {
    return error instanceof LockTimeout ? "busy" : null;
  }
}

/** A transaction of a `MemoryStore`; handlers have no use for it besides `isNewest`. */
export class MemoryTransaction implements InboxStatements {
  readonly keepsRetention = false;
  readonly #db: Database;
  readonly #locked = new Set<string>();
  readonly #seen = new Map<string, Seen>();
  readonly #lanes = new Map<string, LaneState>();
  readonly #latest = new Map<string, Latest>();
  readonly #ended: Promise<void>;
  #markEnded: () => void = () => undefined;

  /** @internal */
  constructor(database: Database) {
    this.#db = database;
    this.#ended = new Promise((resolve) => {
      this.#markEnded = resolve;
    });
  }

  /** @internal Make the changes visible if committed, and wake waiting transactions. */
  end(committed: boolean): void {
    if (committed) {
      this.#commit();
    }
    for (const lock of this.#locked) {
      this.#db.locks.delete(lock);
    }
    this.#markEnded();
  }

  async createTables(): Promise<void> {}

  async advance(): Promise<null> {
    return null;
  }

  async confirm(deliveryId: string): Promise<boolean> {
    return this.#seen.has(deliveryId);
  }

  async addLane(): Promise<void> {}

  async lockLanes(lane: string, replayed: string): Promise<StoredLane[]> {
    const names = [...new Set([lane, replayed])].sort(compareBytes);
    await this.#lock(names.map((name) => `lane ${name}`));
    return names.flatMap((name) => {
      // A delivery creates its own lane, not the one that it replays.
      const state = this.#lane(name) ?? (name === lane ? NEW_LANE : undefined);
      return state ? [this.#row(name, state)] : [];
    });
  }

  async lanes(): Promise<StoredLane[]> {
    const all = new Map([...this.#db.lanes, ...this.#lanes]);
    return [...all].map(([name, state]) => this.#row(name, state));
  }

  async saveLane(lane: string, state: LaneState): Promise<void> {
    this.#lanes.set(lane, state);
  }

  async claim(claim: Claim): Promise<boolean> {
    await this.#lock([`delivery ${claim.deliveryId}`]);
    const at = performance.now();
    const known = this.#seen.get(claim.deliveryId) ?? this.#db.seen.get(claim.deliveryId);
    if (known !== undefined && known.at > at - this.#db.windowMs) {
      return false;
    }
    this.#seen.set(claim.deliveryId, { ...claim, at });
    return true;
  }

  async unclaim(deliveryId: string): Promise<void> {
    this.#seen.delete(deliveryId);
  }

  async latest(event: LatestEvent): Promise<boolean> {
    await this.#lock([`key ${event.key}`]);
    const known = this.#latest.get(event.key) ?? this.#db.latest.get(event.key);
    if (known === undefined) {
      this.#latest.set(event.key, { ...event, againAt: "" });
      return true;
    }
    if (known.deliveryId === event.deliveryId) {
      return true;
    }
    if (!isNewer(known, event)) {
      return false;
    }
    const isAgain = event.lane === "";
    this.#latest.set(
      event.key,
      isAgain
        ? { ...known, deliveryId: event.deliveryId, againAt: event.publishedAt }
        : { ...event, againAt: "" },
    );
    return true;
  }

  // A commit deletes expired rows, and there is no table of requests.

  async lockExpired(): Promise<Claim[]> {
    return [];
  }

  async forget(): Promise<void> {}

  async deleteDeliveries(): Promise<void> {}

  async deleteRequests(): Promise<void> {}

  async logRequest(): Promise<void> {}

  async #lock(names: readonly string[]): Promise<void> {
    for (const name of names) {
      const deadline = performance.now() + LOCK_WAIT_MS;
      for (;;) {
        const holder = this.#db.locks.get(name);
        if (holder === undefined || holder === this) {
          break;
        }
        await endOrTimeout(holder.#ended, deadline - performance.now());
      }
      this.#db.locks.set(name, this);
      this.#locked.add(name);
    }
  }

  #lane(name: string): LaneState | undefined {
    return this.#lanes.get(name) ?? this.#db.lanes.get(name);
  }

  #row(lane: string, state: LaneState): StoredLane {
    return { lane, state, forgotten: this.#db.forgotten.get(lane) ?? 0n };
  }

  #commit(): void {
    const db = this.#db;
    // A map iterates in the order of insertion: inserting again moves an entry to the end.
    moveToEnd(db.seen, this.#seen);
    moveToEnd(db.lanes, this.#lanes);
    moveToEnd(db.latest, this.#latest);
    const oldest = performance.now() - db.windowMs;
    for (const [deliveryId, { at, lane, sequence }] of db.seen) {
      if (db.seen.size <= SEEN_MAX && at > oldest) {
        break;
      }
      db.seen.delete(deliveryId);
      if (lane !== null && sequence !== null && db.lanes.has(lane) && sequence > (db.forgotten.get(lane) ?? 0n)) {
        db.forgotten.set(lane, sequence);
      }
    }
    for (const lane of firstKeys(db.lanes, db.lanes.size - LANES_MAX)) {
      db.lanes.delete(lane);
      db.forgotten.delete(lane);
    }
    for (const key of firstKeys(db.latest, db.latest.size - LATEST_MAX)) {
      db.latest.delete(key);
    }
  }
}

function isNewer(known: Latest, event: LatestEvent): boolean {
  if (event.lane === "") {
    return known.publishedAt < event.publishedAt && known.againAt < event.publishedAt;
  }
  if (event.lane === known.lane) {
    return known.sequence < event.sequence && known.againAt <= event.publishedAt;
  }
  return known.publishedAt <= event.publishedAt && known.againAt <= event.publishedAt;
}

function moveToEnd<V>(target: Map<string, V>, changes: ReadonlyMap<string, V>): void {
  for (const [key, value] of changes) {
    target.delete(key);
    target.set(key, value);
  }
}

function firstKeys(map: ReadonlyMap<string, unknown>, count: number): string[] {
  const keys: string[] = [];
  for (const key of map.keys()) {
    if (keys.length >= count) {
      break;
    }
    keys.push(key);
  }
  return keys;
}

async function endOrTimeout(ended: Promise<void>, waitMs: number): Promise<void> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const timeout = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new LockTimeout("no lock within 30 s")), Math.max(waitMs, 0));
  });
  try {
    await Promise.race([ended, timeout]);
  } finally {
    clearTimeout(timer);
  }
}
