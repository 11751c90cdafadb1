/**
 * Tables and SQL statements of an inbox in PostgreSQL.
 *
 *     inbox      processed deliveries by delivery id, until they expire
 *     lane       the order-check state of each lane
 *     latest     the newest event of each key, for `isNewest`
 *     request    optional: every signed request and its response
 *
 * Layout, lock order and statements are those of the other receiver libraries, so that receivers in several languages
 * can share the tables. JSON is passed as text, because how a driver decodes JSON columns is the application's choice.
 */

import { UsageError } from "../errors.js";

const LOCK_TIMEOUT_S = 10;
const CREATE_ATTEMPTS_MAX = 3;
const PREFIX = /^(?:[a-z_][a-z0-9_]{0,40}\.)?[a-z_][a-z0-9_]{0,40}$/;

/** SQL for one table prefix. */
export interface Statements {
  /** Whether all tables exist; needs no privilege to create them. */
  readonly tablesExist: string;
  /** The DDL, one statement each. */
  readonly create: readonly string[];
  /** Creates the missing tables, also while other sessions do. */
  readonly createTogether: string;
  readonly advance: string;
  /** Fails in a failed transaction. */
  readonly confirm: string;
  readonly addLane: string;
  /** Locks lanes in the order of their names, the global lock order. */
  readonly lockLanes: string;
  readonly lanes: string;
  readonly saveLane: string;
  readonly claim: string;
  readonly unclaim: string;
  readonly latest: string;
  readonly lockExpired: string;
  readonly forget: string;
  readonly deleteDeliveries: string;
  readonly deleteRequests: string;
  readonly logRequest: string;
}

/**
 * Return the statements for the tables `<prefix>_inbox`, `<prefix>_lane` and so on.
 *
 * @throws UsageError the prefix is invalid.
 */
export function statementsOf(prefix: string): Statements {
  if (!PREFIX.test(prefix)) {
    throw new UsageError(
      `prefix: ${JSON.stringify(prefix.slice(0, 100))} is invalid; use a-z, 0-9 and _, optionally after a schema ` +
        "and a dot",
    );
  }
  const bare = prefix.slice(prefix.lastIndexOf(".") + 1);
  const laneRows = `
    SELECT lane, high, ended, CAST(missing AS text), CAST(holes AS text), CAST(unknown AS text), forgotten
      FROM ${prefix}_lane`;
  const create = ddl(prefix, bare);
  return {
    tablesExist: `
      SELECT count(to_regclass('${prefix}_' || name)) = 4
        FROM unnest(ARRAY['inbox', 'lane', 'latest', 'request']) AS name`,
    create,
    // Of several sessions that create the tables, the later ones wait for the first one to commit: its uncommitted row
    // in pg_class conflicts with theirs. They continue with its tables. That requires CREATE on the schema, unlike an
    // advisory lock, which any role may take.
    createTogether: `
      DO $outbox$
      DECLARE
          lock_timeout_before text DEFAULT current_setting('lock_timeout');
      BEGIN
          PERFORM set_config('lock_timeout', '${LOCK_TIMEOUT_S}s', true);
          FOR attempt IN 1..${CREATE_ATTEMPTS_MAX} LOOP
              BEGIN
                  ${create.join(";\n")};
                  EXIT;
              EXCEPTION WHEN duplicate_table OR unique_violation THEN
                  IF attempt = ${CREATE_ATTEMPTS_MAX} THEN RAISE; END IF;
              END;
          END LOOP;
          PERFORM set_config('lock_timeout', lock_timeout_before, true);
      END $outbox$`,
    // $1 delivery id, $2 lane, $3 sequence.
    advance: `
      WITH moved AS (
          UPDATE ${prefix}_lane SET high = CAST($3 AS bigint), heard_at = clock_timestamp()
           WHERE lane = $2 AND high = CAST($3 AS bigint) - 1 AND missing = '[]' AND NOT ended
          RETURNING 1),
      claimed AS (
          INSERT INTO ${prefix}_inbox (delivery_id, lane, sequence)
          SELECT CAST($1 AS text), CAST($2 AS text), CAST($3 AS bigint) FROM moved
          ON CONFLICT (delivery_id) DO NOTHING RETURNING 1)
      SELECT EXISTS (SELECT FROM moved), EXISTS (SELECT FROM claimed)`,
    confirm: `SELECT 1 FROM ${prefix}_inbox WHERE delivery_id = $1`,
    addLane: `INSERT INTO ${prefix}_lane (lane) VALUES ($1) ON CONFLICT (lane) DO NOTHING`,
    lockLanes: `${laneRows} WHERE lane IN ($1, $2) ORDER BY lane COLLATE "C" FOR UPDATE`,
    lanes: `${laneRows} ORDER BY lane`,
    // $1 lane, $2 high, $3 ended, $4 missing, $5 holes, $6 unknown.
    saveLane: `
      UPDATE ${prefix}_lane
         SET high = $2, ended = $3, missing = CAST(CAST($4 AS text) AS jsonb),
             holes = CAST(CAST($5 AS text) AS jsonb), unknown = CAST(CAST($6 AS text) AS jsonb),
             heard_at = clock_timestamp()
       WHERE lane = $1`,
    claim: `
      INSERT INTO ${prefix}_inbox (delivery_id, lane, sequence) VALUES ($1, $2, $3)
      ON CONFLICT (delivery_id) DO NOTHING RETURNING 1`,
    unclaim: `DELETE FROM ${prefix}_inbox WHERE delivery_id = $1`,
    // $1 key, $2 delivery id, $3 lane, $4 sequence, $5 time of publication. Replays and backfills come without a lane:
    // their number does not reflect the age of the event, so they are compared by time of publication. Equal times
    // belong to one transaction, whose later event is also sent later.
    latest: `
      INSERT INTO ${prefix}_latest AS known (key, delivery_id, lane, sequence, published_at)
      VALUES ($1, $2, $3, $4, $5)
      ON CONFLICT (key) DO UPDATE
         SET delivery_id = excluded.delivery_id,
             lane = CASE excluded.lane WHEN '' THEN known.lane ELSE excluded.lane END,
             sequence = CASE excluded.lane WHEN '' THEN known.sequence ELSE excluded.sequence END,
             published_at = CASE excluded.lane WHEN '' THEN known.published_at ELSE excluded.published_at END,
             again_at = CASE excluded.lane WHEN '' THEN excluded.published_at ELSE '' END
       WHERE known.delivery_id = excluded.delivery_id OR CASE excluded.lane
             WHEN '' THEN known.published_at < excluded.published_at AND known.again_at < excluded.published_at
             WHEN known.lane THEN known.sequence < excluded.sequence AND known.again_at <= excluded.published_at
             ELSE known.published_at <= excluded.published_at AND known.again_at <= excluded.published_at END
      RETURNING 1`,
    // $1 retention in seconds, $2 rows.
    lockExpired: `
      SELECT delivery_id, lane, sequence FROM ${prefix}_inbox
       WHERE received_at < clock_timestamp() - make_interval(secs => $1)
       LIMIT $2 FOR UPDATE SKIP LOCKED`,
    forget: `UPDATE ${prefix}_lane SET forgotten = $2 WHERE lane = $1 AND forgotten < $2`,
    deleteDeliveries: `
      DELETE FROM ${prefix}_inbox WHERE delivery_id = ANY(ARRAY(
          SELECT jsonb_array_elements_text(CAST(CAST($1 AS text) AS jsonb))))`,
    deleteRequests: `
      DELETE FROM ${prefix}_request WHERE id = ANY(ARRAY(
          SELECT id FROM ${prefix}_request
           WHERE at < clock_timestamp() - make_interval(secs => $1)
           LIMIT $2 FOR UPDATE SKIP LOCKED))`,
    logRequest: `
      INSERT INTO ${prefix}_request (delivery_id, lane, sequence, type, attempt, outcome, status, reason)
      VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
  };
}

function ddl(prefix: string, bare: string): string[] {
  return [
    `CREATE TABLE IF NOT EXISTS ${prefix}_inbox (
    delivery_id text PRIMARY KEY,
    lane        text,
    sequence    bigint,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp())`,
    // Each delivery updates one of few rows: free space on the page allows HOT updates.
    `CREATE TABLE IF NOT EXISTS ${prefix}_lane (
    lane      text PRIMARY KEY,
    high      bigint NOT NULL DEFAULT 0,
    ended     boolean NOT NULL DEFAULT false,
    missing   jsonb NOT NULL DEFAULT '[]',
    holes     jsonb NOT NULL DEFAULT '[]',
    unknown   jsonb NOT NULL DEFAULT '[]',
    forgotten bigint NOT NULL DEFAULT 0,
    heard_at  timestamptz NOT NULL DEFAULT clock_timestamp()) WITH (fillfactor = 50)`,
    `CREATE TABLE IF NOT EXISTS ${prefix}_latest (
    key          text PRIMARY KEY,
    delivery_id  text NOT NULL,
    lane         text NOT NULL,
    sequence     bigint NOT NULL,
    published_at text COLLATE "C" NOT NULL,
    again_at     text COLLATE "C" NOT NULL DEFAULT '')`,
    `CREATE TABLE IF NOT EXISTS ${prefix}_request (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    delivery_id text,
    lane        text,
    sequence    bigint,
    type        text,
    attempt     int,
    outcome     text NOT NULL,
    status      int NOT NULL,
    reason      text)`,
    // Rows are inserted in the order of these columns, so BRIN indexes suffice.
    `CREATE INDEX IF NOT EXISTS ${bare}_inbox_received ON ${prefix}_inbox
     USING brin (received_at) WITH (pages_per_range = 16, autosummarize = on)`,
    `CREATE INDEX IF NOT EXISTS ${bare}_request_at ON ${prefix}_request
     USING brin (at) WITH (pages_per_range = 16, autosummarize = on)`,
  ];
}
