-- Relays stop first.
--
-- Positions: a text that says exactly which events a snapshot saw.  An endpoint that begins at one is
-- fed the events after it, and then becomes a subscriber.  A relay of an earlier version would neither
-- feed it nor write what is fed.

-- ----------------------------------------------------------------- positions

-- Returns the position of the snapshot of this transaction: which events it saw, as an opaque text.
-- The events after it are those that the snapshot did not see.  The transaction is REPEATABLE READ,
-- or SERIALIZABLE READ ONLY, and has written nothing; it may write afterwards.
--
-- outbox/core/model/position.py has the format.  What the newest batch of the snapshot and older ones
-- sequenced, the snapshot saw: the leader read it after its transactions had ended, and before it
-- wrote the batch.  `seen` is what the snapshot saw besides.
--
-- The outbox is read by its primary key, whatever the statistics say.  The cost of such a plan would
-- start the JIT compiler.
CREATE FUNCTION snapshot_position() RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    chars_max constant integer := 65536;
    level     constant text    := upper(current_setting('transaction_isolation'));
    history    record;
    newest     batch;
    seen       int8multirange;
    content    bytea;
    result     text;
    inserted   pg_lsn;
    deadline   timestamptz;
    pause_s    double precision := 0.005;
BEGIN
    IF level NOT IN ('REPEATABLE READ', 'SERIALIZABLE') THEN
        RAISE EXCEPTION 'at the isolation level % each statement has a snapshot of its own', level
              USING ERRCODE = 'OB004',
                    HINT = 'Begin the transaction with ISOLATION LEVEL REPEATABLE READ.';
    ELSIF level = 'SERIALIZABLE' AND NOT current_setting('transaction_read_only')::boolean THEN
        -- Its predicate locks on the outbox cover every INSERT.
        RAISE EXCEPTION 'in a SERIALIZABLE transaction that may write, producers would fail'
              USING ERRCODE = 'OB004', HINT = 'Begin it with READ ONLY, or with REPEATABLE READ.';
    ELSIF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        -- The position would contain events of this transaction, which no session that imports its
        -- snapshot sees.
        RAISE EXCEPTION 'the transaction has written, and its snapshot does not say what'
              USING ERRCODE = 'OB005', HINT = 'Take the position before the transaction writes.';
    END IF;

    -- From rows of the snapshot, because a standby does not report its timeline.
    SELECT i.id, coalesce(c.timeline, 0) AS timeline INTO history
      FROM cursor c, incarnation i WHERE i.by_xid = i.xmin::text::bigint;
    SELECT * INTO newest FROM batch b ORDER BY b.batch DESC LIMIT 1;
    IF history.id IS NULL OR newest.batch IS NULL THEN
        RAISE EXCEPTION 'no relay has run since the database was restored'
              USING ERRCODE = 'OB006', HINT = 'Start the relay, and begin another transaction.';
    END IF;

    -- OFFSET 0: one probe for each range; a join would read all events from the oldest gap on.
    SELECT coalesce(range_agg(int8range(e.id, e.id, '[]')), '{}') INTO seen
      FROM (SELECT newest.high + 1 AS lo, 9223372036854775807 AS hi
             UNION ALL
            SELECT lower(young), upper(young) - 1 FROM unnest(newest.young) AS young
             UNION ALL
            SELECT g.lo, g.hi FROM gap g) r
     CROSS JOIN LATERAL (SELECT o.id FROM outbox o WHERE o.id BETWEEN r.lo AND r.hi OFFSET 0) e;

    -- A number has seven bits in each byte, the lowest first; all bytes but its last one have the
    -- eighth bit.  A range has two bytes or more.
    IF (SELECT count(*) * 2 FROM unnest(seen)) < chars_max * 3 / 4 THEN
        WITH range AS (
            SELECT lower(r) AS lo, upper(r) - 1 AS hi,
                   lag(upper(r) - 1, 1, 0::bigint) OVER (ORDER BY r) AS hi_before
              FROM unnest(seen) AS r),
        number (lo, place, value) AS (
            VALUES (0, 1, history.timeline), (0, 2, newest.batch), (0, 3, newest.high),
                   (0, 4, (extract(epoch FROM newest.at) * 1000000)::bigint)
            UNION ALL SELECT lo, 1, lo - hi_before FROM range
            UNION ALL SELECT lo, 2, hi - lo FROM range)
        SELECT '\x01' || uuid_send(history.id) || string_agg(
                   set_byte('\x00', 0, (value >> 7 * i & 127)::integer
                            + CASE WHEN value >> 7 * i > 127 THEN 128 ELSE 0 END),
                   '' ORDER BY lo, place, i)
          INTO content
          FROM number, generate_series(0, 8) AS i WHERE i = 0 OR value >> 7 * i > 0;
        content := content || substr(sha256(content), 1, 4);
        result := translate(encode(content, 'base64'), E'+/=\n', '-_');
    END IF;
    IF result IS NULL OR length(result) > chars_max THEN
        RAISE EXCEPTION '% events wait to be sequenced, in too many ranges of ids for a position',
                        (SELECT sum(upper(r) - lower(r)) FROM unnest(seen) AS r)
              USING ERRCODE = 'OB007',
                    HINT = 'Start the relay, or wait until it has caught up; '
                           'then begin another transaction.';
    END IF;

    -- A crash may take back what was seen: commits with synchronous_commit = off and the ids of their
    -- events, which other events would get.  What a batch sequenced was flushed with the batch.
    IF NOT isempty(seen) AND NOT pg_is_in_recovery() THEN
        inserted := pg_current_wal_insert_lsn();
        IF pg_current_wal_flush_lsn() >= inserted THEN
            RETURN result;
        END IF;
        -- While nothing commits, the WAL writer leaves a page that is not full; and the position at the
        -- beginning of a page is after its header, which is written with the next record.  A message
        -- flushes the log from version 17 on, and on older ones fills the page.  It assigns no xid.
        IF current_setting('server_version_num')::integer >= 170000 THEN
            EXECUTE 'SELECT pg_logical_emit_message(false, ''outbox'', '''', true)';
        ELSE
            PERFORM pg_logical_emit_message(
                false, 'outbox', repeat(' ', current_setting('wal_block_size')::integer));
        END IF;
        deadline := clock_timestamp() + interval '20 s';
        WHILE pg_current_wal_flush_lsn() < inserted LOOP
            IF clock_timestamp() > deadline THEN
                RAISE EXCEPTION 'what the snapshot saw was not on disk after 20 s'
                      USING ERRCODE = 'OB008',
                            HINT = 'Take it again: each commit of another transaction writes it.';
            END IF;
            PERFORM pg_sleep(pause_s);
            pause_s := least(pause_s * 1.5, 0.05);
        END LOOP;
    END IF;
    RETURN result;
END $$;
REVOKE ALL ON FUNCTION snapshot_position FROM PUBLIC;

-- --------------------------------------------------------------------- feeds

-- An endpoint that is fed.  The batches say which events they sequenced, in (batch, id) order:
--
--     ids above the `high` of the row before and up to `high`, which are not in `young`, and `found`
--
-- So it holds for every batch: a new gap is in `young` of the batch that made it, and of a written row
-- only `dead` may be corrected later.  `events` is their number.
CREATE TABLE feed (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id uuid   NOT NULL REFERENCES endpoint,
    from_batch  bigint NOT NULL,  -- it began after this event of this batch,
    from_id     bigint NOT NULL,
    batch       bigint NOT NULL,  -- and has passed this one
    outbox_id   bigint NOT NULL,
    seen        int8multirange NOT NULL DEFAULT '{}',  -- events that the position has seen: not fed
    after_job   bigint REFERENCES replay_job,  -- whose deliveries come first; NULL: none

    -- The subscription that the feed applies, as in `subscription`.
    types       text[] NOT NULL,
    tenant      text,
    all_tenants boolean NOT NULL,
    filter      text,
    filter_stopped_at     timestamptz,
    filter_stopped_reason text,

    fed         bigint NOT NULL DEFAULT 0,  -- deliveries
    expired     bigint NOT NULL DEFAULT 0,  -- events that were skipped
    erased      bigint NOT NULL DEFAULT 0,
    missing     bigint NOT NULL DEFAULT 0,
    began_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at    timestamptz,
    -- Changed: the next feed of the endpoint goes on from here.  Disabled, removed: what is left was not
    -- fed, unless it is enabled with what it missed.
    end_reason  text CHECK (end_reason IN ('arrived', 'changed', 'disabled', 'removed')),
    CHECK ((ended_at IS NULL) = (end_reason IS NULL))
);
CREATE UNIQUE INDEX feed_running ON feed (endpoint_id) WHERE ended_at IS NULL;
CREATE INDEX feed_endpoint ON feed (endpoint_id, id);

-- The batches that have deliveries of a feed, and the place that it had reached with each: an event is
-- in the first one whose place is not before it.
CREATE TABLE feed_step (
    feed_id  bigint NOT NULL REFERENCES feed,
    to_batch bigint NOT NULL,
    to_id    bigint NOT NULL,
    batch    bigint NOT NULL,
    PRIMARY KEY (feed_id, to_batch, to_id)
);
CREATE INDEX feed_step_batch ON feed_step (feed_id, batch);

-- The batches in which feeds gave an event to endpoints that may have it.
CREATE FUNCTION fed_in(event_batch bigint, event_id bigint)
RETURNS TABLE (batch bigint, feed_id bigint, endpoint_id uuid)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT s.batch, f.id, f.endpoint_id
      FROM feed f
     CROSS JOIN LATERAL (
           SELECT batch FROM feed_step
            WHERE feed_id = f.id AND (to_batch, to_id) >= (event_batch, event_id)
            ORDER BY to_batch, to_id LIMIT 1) s
     WHERE (f.from_batch, f.from_id) < (event_batch, event_id)
       AND (f.batch, f.outbox_id) >= (event_batch, event_id)
$$;

ALTER TABLE delivery_run ADD COLUMN feed_id bigint;  -- the feed that gave it an earlier event
ALTER TYPE delivery_run_row ADD ATTRIBUTE feed_id bigint;
CREATE OR REPLACE VIEW delivery AS
    SELECT r.lane_id, r.batch, r.seq + u.n - 1 AS seq, r.outbox_id + u.after AS outbox_id, r.replay_id,
           r.replay_seq, r.backfill_id, r.copy_id, r.feed_id
      FROM delivery_run r
     CROSS JOIN LATERAL unnest(coalesce(r.offsets, '{0}')) WITH ORDINALITY AS u(after, n);

-- As in 0024_runs.sql, and what feeds gave.
CREATE OR REPLACE FUNCTION erase_responses(event_ids bigint[], attempts_max integer)
RETURNS TABLE (erased_lane_id bigint)
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
    WITH event AS MATERIALIZED (
        SELECT given.id
          FROM unnest(event_ids) AS given(id)
          LEFT JOIN LATERAL (SELECT id, erased_at FROM outbox WHERE id = given.id LIMIT 1) o ON true
         WHERE o.erased_at IS NOT NULL
            OR o.id IS NULL AND EXISTS (
               SELECT FROM dead_letter
                WHERE outbox_id = given.id AND payload IS NULL AND body IS NULL)),
    positions AS MATERIALIZED (
        SELECT e.id, b.batch, b.late
          FROM event e
         CROSS JOIN LATERAL (
               SELECT batch, young @> e.id OR batch > 0 AND batch = (
                          SELECT min(number) * 100000000000 FROM period
                           WHERE kind = 'log' AND dropped_at IS NULL) AS late
                 FROM batch WHERE high >= e.id ORDER BY high, batch LIMIT 1) b),
    own AS MATERIALIZED (
        SELECT id, batch FROM positions WHERE NOT late
         UNION
        SELECT p.id, b.batch FROM positions p CROSS JOIN LATERAL (
               SELECT batch FROM batch
                WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.id
                ORDER BY batch LIMIT 1) b),
    sequenced AS MATERIALIZED (
        SELECT batch FROM own
         UNION
        SELECT f.batch FROM own o CROSS JOIN LATERAL fed_in(o.batch, o.id) f),
    delivered AS MATERIALIZED (
        SELECT d.lane_id, d.batch, d.seq
          FROM sequenced s
         CROSS JOIN LATERAL (SELECT lanes FROM batch WHERE batch = s.batch LIMIT 1) b
         CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
         CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq FROM delivery
                WHERE lane_id = lane.id AND batch = s.batch
                  AND outbox_id = ANY (ARRAY(SELECT id FROM event)) OFFSET 0) d
         UNION
        SELECT lane_id, batch, seq FROM delivery_run
         WHERE outbox_id = ANY (ARRAY(SELECT id FROM event))
           AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)),
    elements AS MATERIALIZED (
        SELECT a.*, g.seq - a.seq + 1 AS n
          FROM delivered g
         CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq, attempt, replica_id FROM attempt_run
                WHERE lane_id = g.lane_id AND batch = g.batch
                  AND seq > g.seq - 256 AND seq <= g.seq AND seq + count > g.seq
                  AND CASE count WHEN 1 THEN response ELSE response_of(response, g.seq - seq + 1)
                      END ?| '{body,headers}' OFFSET 0) a
         LIMIT attempts_max),
    found AS MATERIALIZED (
        SELECT lane_id, batch, seq, attempt, replica_id, array_agg(n) AS elements
          FROM elements GROUP BY lane_id, batch, seq, attempt, replica_id
         ORDER BY lane_id, batch, seq, attempt, replica_id),
    erased AS (
        UPDATE attempt_run a SET response = without_responses(a.response, f.elements)
          FROM found f
         WHERE a.lane_id = f.lane_id AND a.batch = f.batch AND a.seq = f.seq
           AND a.attempt = f.attempt AND a.replica_id = f.replica_id
        RETURNING a.lane_id, f.elements),
    retrying AS MATERIALIZED (
        SELECT p.lane_id FROM lane_progress p JOIN delivered g ON p.lane_id = g.lane_id
         WHERE p.retry_seq = g.seq AND p.last_response ?| '{body,headers}'
         ORDER BY p.lane_id FOR NO KEY UPDATE OF p SKIP LOCKED),
    cleared AS (
        UPDATE lane_progress p SET last_response = p.last_response - 'body' - 'headers'
          FROM retrying WHERE p.lane_id = retrying.lane_id),
    failing AS MATERIALIZED (
        SELECT h.endpoint_id FROM endpoint_health h
         WHERE h.last_response ?| '{body,headers}' AND h.endpoint_id IN (
               SELECT l.endpoint_id FROM delivered g JOIN lane l ON l.id = g.lane_id)
         ORDER BY h.endpoint_id FOR NO KEY UPDATE OF h SKIP LOCKED),
    reset AS (
        UPDATE endpoint_health h SET last_response = h.last_response - 'body' - 'headers'
          FROM failing WHERE h.endpoint_id = failing.endpoint_id)
    SELECT e.lane_id FROM erased e CROSS JOIN LATERAL unnest(e.elements)
$$;

-- As in 0026_probes.sql, with positions and feeds.
CREATE OR REPLACE FUNCTION added_privileges(purpose text) RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT kind, name, privilege, of_columns, NULL::text[]
      FROM (VALUES
        ('{relay,operator,reader,api}'::text[], 'table', 'tenant_share', 'SELECT', NULL::text[]),
        ('{relay,operator,reader,api}', 'table', 'quota', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'idempotency_key_count', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'removed_lanes', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'function', 'added_privileges', 'EXECUTE', NULL),
        ('{relay,operator,reader,api}', 'table', 'attempt_run', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'delivery_run', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'feed', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'feed_step', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'function', 'fed_in', 'EXECUTE', NULL),
        ('{relay,operator,reader,api}', 'function', 'response_of', 'EXECUTE', NULL),
        -- Runs of a tenant's schedule are held; an erasure names the newest event that is left.
        ('{relay,operator,api}', 'table', 'tenant_share', 'INSERT', '{tenant}'),
        ('{relay,operator,api}', 'table', 'tenant_share', 'UPDATE', '{last_id,total}'),
        ('{relay,operator,api}', 'table', 'future_event', 'INSERT',
         '{event_id,tenant,type,key,payload,headers,deliver_at,cost,held_before}'),
        ('{relay,operator,api}', 'function', 'lock_share', 'EXECUTE', NULL),
        ('{relay}', 'table', 'future_event', 'UPDATE', '{held_before}'),
        -- An erasure locks events in one order.
        ('{operator,api}', 'table', 'future_event', 'UPDATE', '{retry_at}'),
        ('{relay}', 'function', 'try_lock_share', 'EXECUTE', NULL),
        ('{relay}', 'function', 'forget_shares', 'EXECUTE', NULL),
        ('{operator,api}', 'table', 'quota', 'INSERT', NULL),
        ('{operator,api}', 'table', 'quota', 'UPDATE', '{endpoints,lanes,schedules,once_keys}'),
        ('{operator,api}', 'table', 'quota', 'DELETE', NULL),
        ('{relay}', 'function', 'count_idempotency_keys', 'EXECUTE', NULL),
        ('{relay}', 'function', 'remove_lanes', 'EXECUTE', NULL),
        ('{operator,api}', 'table', 'replay_job', 'INSERT', '{outbox_ids}'),
        ('{api}', 'function', 'publish_shared', 'EXECUTE', NULL),
        ('{producer,relay,operator,reader}', 'function', 'snapshot_position', 'EXECUTE', NULL),
        -- The leader feeds, makes the endpoint a subscriber at the end, and forgets steps with their log.
        ('{relay}', 'table', 'feed', 'UPDATE',
         '{batch,outbox_id,seen,fed,expired,erased,missing,filter_stopped_at,filter_stopped_reason,ended_at,end_reason}'),
        ('{relay}', 'table', 'feed_step', 'INSERT', NULL),
        ('{relay}', 'table', 'feed_step', 'DELETE', NULL),
        ('{relay}', 'table', 'subscription', 'INSERT', NULL),
        ('{operator,api}', 'table', 'feed', 'INSERT',
         '{endpoint_id,from_batch,from_id,batch,outbox_id,seen,after_job,types,tenant,all_tenants,filter}'),
        ('{operator,api}', 'table', 'feed', 'UPDATE', '{ended_at,end_reason}')
      ) AS added(purposes, kind, name, privilege, of_columns)
     WHERE purpose = ANY (purposes)
$$;
