package receiver

import (
	"fmt"
	"regexp"
	"strings"
)

// statements are the SQL statements of an inbox for one prefix of its tables.
//
//	inbox      processed deliveries by X-Delivery, until they expire
//	lane       the order-check state of each lane
//	latest     the newest event of each key, for IsNewest
//	request    optional: every signed request and its response
//
// Tables, prefix and lock order are those of the receiver libraries in other languages, so that
// several can share one database.  JSON is passed as text, because every driver has text.
type statements struct {
	// isThere: whether all tables exist; it needs no privilege to create them.
	isThere string
	// create creates the missing tables, in one statement, also while others do.
	create string
	// schema is the same for migrations: plain statements.
	schema string

	advance, confirm, addLane, lockLanes, claim, unclaim, keepLane, lanes string
	lockOld, forget, expire, expireRequests, latest, logRequest           string
}

// DefaultPrefix begins the names of the tables of an inbox.
const DefaultPrefix = "outbox"

var tablePrefix = regexp.MustCompile(`\A(?:[a-z_][a-z0-9_]{0,40}\.)?[a-z_][a-z0-9_]{0,40}\z`)

func newStatements(prefix string) (*statements, error) {
	if !tablePrefix.MatchString(prefix) {
		if len(prefix) > 100 {
			prefix = prefix[:100]
		}
		return nil, fmt.Errorf("receiver: prefix: %q is invalid; use a-z, 0-9 and _, optionally after a "+
			"schema and a dot", prefix)
	}
	names := strings.NewReplacer("{p}", prefix, "{bare}", prefix[strings.LastIndexByte(prefix, '.')+1:])
	named := names.Replace
	return &statements{
		isThere: named(isThereSQL), create: named(createTogetherSQL), schema: named(createSQL),
		advance: named(advanceSQL), confirm: named(confirmSQL), addLane: named(addLaneSQL),
		lockLanes: named(lockLanesSQL), claim: named(claimSQL),
		unclaim: named(unclaimSQL), keepLane: named(keepLaneSQL), lanes: named(lanesSQL),
		lockOld: named(lockOldSQL), forget: named(forgetSQL), expire: named(expireSQL),
		expireRequests: named(expireRequestsSQL), latest: named(latestSQL), logRequest: named(logRequestSQL),
	}, nil
}

const isThereSQL = `
SELECT count(to_regclass('{p}_' || name)) = 4
  FROM unnest(ARRAY['inbox', 'lane', 'latest', 'request']) AS name`

// Each delivery updates one of few rows of {p}_lane: free space on the page allows HOT updates.
// Rows are inserted in the order of the indexed times, so BRIN indexes suffice.
const createSQL = `
CREATE TABLE IF NOT EXISTS {p}_inbox (
    delivery_id text PRIMARY KEY,
    lane        text,
    sequence    bigint,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE IF NOT EXISTS {p}_lane (
    lane      text PRIMARY KEY,
    high      bigint NOT NULL DEFAULT 0,
    ended     boolean NOT NULL DEFAULT false,
    missing   jsonb NOT NULL DEFAULT '[]',
    holes     jsonb NOT NULL DEFAULT '[]',
    unknown   jsonb NOT NULL DEFAULT '[]',
    forgotten bigint NOT NULL DEFAULT 0,
    heard_at  timestamptz NOT NULL DEFAULT clock_timestamp()) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS {p}_latest (
    key          text PRIMARY KEY,
    delivery_id  text NOT NULL,
    lane         text NOT NULL,
    sequence     bigint NOT NULL,
    published_at text COLLATE "C" NOT NULL,
    again_at     text COLLATE "C" NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS {p}_request (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    delivery_id text,
    lane        text,
    sequence    bigint,
    type        text,
    attempt     int,
    outcome     text NOT NULL,
    status      int NOT NULL,
    reason      text);
CREATE INDEX IF NOT EXISTS {bare}_inbox_received ON {p}_inbox
 USING brin (received_at) WITH (pages_per_range = 16, autosummarize = on);
CREATE INDEX IF NOT EXISTS {bare}_request_at ON {p}_request
 USING brin (at) WITH (pages_per_range = 16, autosummarize = on);`

// Of several sessions that create the tables, the later ones wait for the first one to commit: its
// uncommitted row in pg_class conflicts with theirs.  They continue with its tables.  That requires
// CREATE on the schema, unlike an advisory lock, which any role may take.
const createTogetherSQL = `
DO $outbox$
DECLARE
    lock_timeout_before text DEFAULT current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', '10s', true);
    FOR attempt IN 1..3 LOOP
        BEGIN` + createSQL + `
            EXIT;
        EXCEPTION WHEN duplicate_table OR unique_violation THEN
            IF attempt = 3 THEN RAISE; END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
END $outbox$`

// advanceSQL is a fast path in one statement: $1 sequence number, $2 lane, $3 X-Delivery.
const advanceSQL = `
WITH moved AS (
    UPDATE {p}_lane SET high = CAST($1 AS bigint), heard_at = clock_timestamp()
     WHERE lane = CAST($2 AS text) AND high = CAST($1 AS bigint) - 1
       AND missing = '[]' AND NOT ended
    RETURNING 1),
claimed AS (
    INSERT INTO {p}_inbox (delivery_id, lane, sequence)
    SELECT CAST($3 AS text), CAST($2 AS text), CAST($1 AS bigint) FROM moved
    ON CONFLICT (delivery_id) DO NOTHING RETURNING 1)
SELECT EXISTS (SELECT FROM moved), EXISTS (SELECT FROM claimed)`

// confirmSQL fails in a failed transaction, which some drivers would commit without an error.
const confirmSQL = `SELECT 1 FROM {p}_inbox WHERE delivery_id = $1`

const addLaneSQL = `INSERT INTO {p}_lane (lane) VALUES ($1) ON CONFLICT (lane) DO NOTHING`

const laneRowsSQL = `
SELECT lane, high, ended, CAST(missing AS text), CAST(holes AS text), CAST(unknown AS text), forgotten
  FROM {p}_lane`

// lockLanesSQL locks lanes in the order of their names, the global lock order.
const lockLanesSQL = laneRowsSQL + `
 WHERE lane IN ($1, $2) ORDER BY lane COLLATE "C" FOR UPDATE`

const lanesSQL = laneRowsSQL + ` ORDER BY lane`

// claimSQL returns a row if the X-Delivery is new; it waits for a concurrent insert of it.
const claimSQL = `
INSERT INTO {p}_inbox (delivery_id, lane, sequence) VALUES ($1, $2, $3)
ON CONFLICT (delivery_id) DO NOTHING RETURNING 1`

const unclaimSQL = `DELETE FROM {p}_inbox WHERE delivery_id = $1`

const keepLaneSQL = `
UPDATE {p}_lane
   SET high = $2, ended = $3, missing = CAST(CAST($4 AS text) AS jsonb),
       holes = CAST(CAST($5 AS text) AS jsonb), unknown = CAST(CAST($6 AS text) AS jsonb),
       heard_at = clock_timestamp()
 WHERE lane = $1`

// lockOldSQL skips rows that other sessions are expiring.
const lockOldSQL = `
SELECT delivery_id, lane, sequence FROM {p}_inbox
 WHERE received_at < clock_timestamp() - make_interval(secs => CAST($1 AS double precision))
 LIMIT $2 FOR UPDATE SKIP LOCKED`

const forgetSQL = `UPDATE {p}_lane SET forgotten = $2 WHERE lane = $1 AND forgotten < $2`

const expireSQL = `
DELETE FROM {p}_inbox WHERE delivery_id = ANY(ARRAY(
    SELECT jsonb_array_elements_text(CAST(CAST($1 AS text) AS jsonb))))`

const expireRequestsSQL = `
DELETE FROM {p}_request WHERE id = ANY(ARRAY(
    SELECT id FROM {p}_request
     WHERE at < clock_timestamp() - make_interval(secs => CAST($1 AS double precision))
     LIMIT $2 FOR UPDATE SKIP LOCKED))`

const logRequestSQL = `
INSERT INTO {p}_request (delivery_id, lane, sequence, type, attempt, outcome, status, reason)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`

// latestSQL returns a row unless a newer event of the key is recorded.
//
// Replays and backfills come without a lane: their number does not reflect the age of the event, so
// they are compared by time of publication.  Equal times belong to one transaction, whose later
// event is also sent later.
const latestSQL = `
INSERT INTO {p}_latest AS known (key, delivery_id, lane, sequence, published_at)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (key) DO UPDATE
   SET delivery_id = excluded.delivery_id,
       lane = CASE excluded.lane WHEN '' THEN known.lane ELSE excluded.lane END,
       sequence = CASE excluded.lane WHEN '' THEN known.sequence ELSE excluded.sequence END,
       published_at = CASE excluded.lane WHEN '' THEN known.published_at ELSE excluded.published_at END,
       again_at = CASE excluded.lane WHEN '' THEN excluded.published_at ELSE '' END
 WHERE known.delivery_id = excluded.delivery_id OR CASE excluded.lane
       WHEN '' THEN known.published_at < excluded.published_at
                    AND known.again_at < excluded.published_at
       WHEN known.lane THEN known.sequence < excluded.sequence
                            AND known.again_at <= excluded.published_at
       ELSE known.published_at <= excluded.published_at
            AND known.again_at <= excluded.published_at END
RETURNING 1`
