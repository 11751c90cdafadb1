/**
 * Store in PostgreSQL, over a `Pool` of `pg`.
 *
 *     const store = new PgStore(new pg.Pool({ connectionString }));
 *     const receiver = new Receiver(secret, store);
 *     receiver.on("order.*", async (message, client) => {
 *       await client.query("INSERT INTO …", […]);
 *     });
 *
 * The delivery is recorded and the handler runs in one transaction; the handler gets its client. The tables are those
 * of the other receiver libraries: receivers in several languages can share one database.
 */

import type { Pool, PoolClient } from "pg";

import { Busy, OutboxError, Refuse, UsageError, causesOf, isSystemError } from "./errors.js";
import { statementsOf, type Statements } from "./inbox/statements.js";
import type {
  Claim,
  DatabaseCondition,
  InboxStatements,
  LatestEvent,
  RequestRow,
  Store,
  StoredLane,
} from "./inbox/store.js";
import type { LaneState } from "./lane-order.js";
import { formatRanges, parseRanges } from "./ranges.js";

/** Options of a store in PostgreSQL. */
export interface PgStoreOptions {
  /**
   * Prefix of the table names, optionally with a schema (`hooks.outbox`); `outbox` by default. Receivers of different
   * senders need different prefixes.
   */
  readonly prefix?: string;
}

/** The connection to the database was lost during a transaction. */
class ConnectionLost extends OutboxError {}

/** Store of an inbox in PostgreSQL. Handlers get the `PoolClient` of the transaction. */
export class PgStore implements Store<PoolClient> {
  readonly #pool: Pool;
  readonly #sql: Statements;

  /**
   * @param pool a pool of `pg`. Set its `connectionTimeoutMillis`, and its `statement_timeout` above the duration of
   *   the slowest handler's statements, so that an unreachable or locked database is reported to the sender.
   * @throws UsageError the prefix is invalid.
   */
  constructor(pool: Pool, options: PgStoreOptions = {}) {
    if (typeof (pool as Partial<Pool> | undefined)?.connect !== "function") {
      throw new UsageError("pool: must be a pool, such as new pg.Pool({ connectionString: address })");
    }
    this.#pool = pool;
    this.#sql = statementsOf(options.prefix ?? "outbox");
  }

  /** The DDL of the tables, for an application's own migrations. */
  get schema(): string {
    return this.#sql.create.map((statement) => `${statement};\n`).join("");
  }

  async transaction<T>(work: (tx: PoolClient) => Promise<T>): Promise<T> {
    const client = await this.#pool.connect();
    let lost: Error | null = null;
    // A pool does not listen for errors of a client in use, and an error event without a listener ends the process.
    const onError = (error: Error) => {
      lost ??= error;
    };
    client.on("error", onError);
    try {
      await client.query("BEGIN");
      const result = await work(client);
      const { command } = await client.query("COMMIT");
      if (command !== "COMMIT") {
        // PostgreSQL responds ROLLBACK, without an error, if a statement has failed and its error was caught.
        throw new UsageError("a statement of the transaction had failed, so it was rolled back");
      }
      return result;
    } catch (error) {
      await client.query("ROLLBACK").catch(onError);
      if (lost !== null && !(error instanceof Refuse) && !(error instanceof Busy)) {
        throw new ConnectionLost("the connection was lost during a transaction", { cause: error });
      }
      throw error;
    } finally {
      client.off("error", onError);
      client.release(lost ?? undefined);
    }
  }

  statements(tx: PoolClient): InboxStatements {
    return new PgStatements(this.#sql, tx);
  }

  conditionOf(error: unknown): DatabaseCondition | null {
    return conditionOf(error);
  }
}

class PgStatements implements InboxStatements {
  readonly keepsRetention = true;
  readonly #sql: Statements;
  readonly #client: PoolClient;

  constructor(sql: Statements, client: PoolClient) {
    this.#sql = sql;
    this.#client = client;
  }

  async createTables(): Promise<void> {
    const [row] = await this.#rows(this.#sql.tablesExist);
    if (row?.[0] !== "t") {
      await this.#rows(this.#sql.createTogether);
    }
  }

  async advance({ deliveryId, lane, sequence }: Claim): Promise<{ moved: boolean; claimed: boolean }> {
    const [row] = await this.#rows(this.#sql.advance, deliveryId, lane, sequence);
    return { moved: row?.[0] === "t", claimed: row?.[1] === "t" };
  }

  async confirm(deliveryId: string): Promise<boolean> {
    return (await this.#rows(this.#sql.confirm, deliveryId)).length > 0;
  }

  async addLane(lane: string): Promise<void> {
    await this.#rows(this.#sql.addLane, lane);
  }

  async lockLanes(lane: string, replayed: string): Promise<StoredLane[]> {
    return (await this.#rows(this.#sql.lockLanes, lane, replayed)).map(storedLane);
  }

  async lanes(): Promise<StoredLane[]> {
    return (await this.#rows(this.#sql.lanes)).map(storedLane);
  }

  async saveLane(lane: string, state: LaneState): Promise<void> {
    const ranges = [state.missing, state.holes, state.unknown].map(formatRanges);
    await this.#rows(this.#sql.saveLane, lane, state.high, state.ended, ...ranges);
  }

  async claim({ deliveryId, lane, sequence }: Claim): Promise<boolean> {
    return (await this.#rows(this.#sql.claim, deliveryId, lane, sequence)).length > 0;
  }

  async unclaim(deliveryId: string): Promise<void> {
    await this.#rows(this.#sql.unclaim, deliveryId);
  }

  async latest({ key, deliveryId, lane, sequence, publishedAt }: LatestEvent): Promise<boolean> {
    return (await this.#rows(this.#sql.latest, key, deliveryId, lane, sequence, publishedAt)).length > 0;
  }

  async lockExpired(keepS: number, rows: number): Promise<Claim[]> {
    return (await this.#rows(this.#sql.lockExpired, keepS, rows)).map(([deliveryId, lane, sequence]) => ({
      deliveryId: deliveryId ?? "",
      lane: lane ?? null,
      sequence: sequence == null ? null : BigInt(sequence),
    }));
  }

  async forget(lane: string, sequence: bigint): Promise<void> {
    await this.#rows(this.#sql.forget, lane, sequence);
  }

  async deleteDeliveries(deliveryIds: readonly string[]): Promise<void> {
    await this.#rows(this.#sql.deleteDeliveries, JSON.stringify(deliveryIds));
  }

  async deleteRequests(keepS: number, rows: number): Promise<void> {
    await this.#rows(this.#sql.deleteRequests, keepS, rows);
  }

  async logRequest(row: RequestRow): Promise<void> {
    const { deliveryId, lane, sequence, type, attempt, outcome, status, reason } = row;
    await this.#rows(this.#sql.logRequest, deliveryId, lane, sequence, type, attempt, outcome, status, reason);
  }

  async #rows(text: string, ...values: (string | bigint | number | boolean | null)[]): Promise<Row[]> {
    const result = await this.#client.query<Row>({
      text,
      values: values.map((value) => (value === null ? null : String(value))),
      rowMode: "array",
      types: TEXT_TYPES,
    });
    return result.rows;
  }
}

/** Values as PostgreSQL's text: an application may have registered parsers that round `bigint`. */
type Row = (string | null)[];
const TEXT_TYPES = { getTypeParser: () => (text: string) => text };

function storedLane([lane, high, ended, missing, holes, unknown, forgotten]: Row): StoredLane {
  return {
    lane: lane ?? "",
    state: {
      high: BigInt(high ?? 0),
      ended: ended === "t",
      missing: parseRanges(missing ?? ""),
      holes: parseRanges(holes ?? ""),
      unknown: parseRanges(unknown ?? ""),
    },
    forgotten: BigInt(forgotten ?? 0),
  };
}

/** Conditions by SQLSTATE or its class: https://www.postgresql.org/docs/current/errcodes-appendix.html */
const BY_SQLSTATE: Readonly<Record<string, DatabaseCondition>> = {
  "08": "unavailable", // Connection exception; all errors of PgBouncer.
  "28": "unavailable", // The login was refused.
  "3D": "unavailable", // No such database, reported at the login.
  "53": "unavailable", // Insufficient resources: connections, disk, memory.
  "57": "unavailable", // Shutdown, start or crash of the server.
  "58": "unavailable", // System error, such as of a disk.
  "57014": "busy", // Query canceled, as by statement_timeout.
  "40001": "busy", // Serialization failure.
  "40P01": "busy", // Deadlock detected.
  "55P03": "busy", // Lock not available, as by lock_timeout.
  "25P03": "busy", // Idle in transaction session timeout.
  "25P04": "busy", // Transaction timeout.
};

/** Errors of `pg` itself, which have no SQLSTATE. */
const BY_MESSAGE: readonly [RegExp, DatabaseCondition][] = [
  [/^timeout exceeded when trying to connect/, "busy"], // All clients of the pool are in use.
  [/^Query read timeout/, "busy"],
  [/^Connection terminated/, "unavailable"],
  [/^Client has encountered a connection error/, "unavailable"],
  [/^Client was closed and is not queryable/, "unavailable"],
];

function conditionOf(error: unknown): DatabaseCondition | null {
  const causes = causesOf(error);
  // The SQLSTATE is that of any error of the chain: libraries over `pg` wrap its errors.
  for (const cause of causes) {
    if ("severity" in cause && "code" in cause && typeof cause.code === "string") {
      return BY_SQLSTATE[cause.code] ?? BY_SQLSTATE[cause.code.slice(0, 2)] ?? null;
    }
  }
  for (const cause of causes) {
    if (cause instanceof ConnectionLost || isSystemError(cause)) {
      return "unavailable";
    }
    const found = BY_MESSAGE.find(([pattern]) => pattern.test(cause.message));
    if (found !== undefined) {
      return found[1];
    }
  }
  return null;
}
