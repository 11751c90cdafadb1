-- Relays stop first.
--
-- Runs: what follows one another in a lane is written once.  A row for each delivery and one for each
-- success were most of what the server paid for a delivery: a run of 250 takes three bytes of WAL for
-- each.  A run of one takes what a row took, so there is one format for every load.
--
-- The views `delivery` and `attempt` have one row for each, with the columns of the tables before.
-- Statements name the tables where a view would read more than it needs: see
-- outbox/store/sql/expressions.py.

-- First, because waiting for readers after the log was copied would copy it in vain.
LOCK TABLE delivery, attempt IN ACCESS EXCLUSIVE MODE;

-- As in 0019_faults.sql.  INCLUDING STORAGE: without it, the arrays of runs would be compressed, or moved
-- out of line, in new partitions.
CREATE OR REPLACE FUNCTION make_partition(
    parent regclass, number bigint, width bigint DEFAULT 100000000000
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    child text := (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS '
                   'INCLUDING GENERATED INCLUDING STORAGE)', child, parent);
    IF parent = 'outbox'::regclass THEN
        EXECUTE format('CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON %I '
                       'FOR EACH STATEMENT EXECUTE FUNCTION refuse_removal()', child);
        EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_truncate', child);
    END IF;
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                   parent, child, number * width, (number + 1) * width);
END $$;

-- Consecutive deliveries of one lane in one batch.  The n-th has sequence seq + n - 1 and event
-- outbox_id + offsets[n].  The view `delivery` has a row for each.  Partitioned by batch, not by event: a
-- lane is read from its floor batch on, and so reads only the newest partitions.
CREATE TABLE delivery_run (
    lane_id     bigint NOT NULL,
    batch       bigint NOT NULL,
    seq         bigint NOT NULL,  -- of the first delivery
    outbox_id   bigint NOT NULL,  -- of the first delivery
    offsets     smallint[],       -- the first is 0, none is negative; NULL: one delivery
    -- What repeats another delivery is a run of one: it is found by its event.
    replay_id   bigint,           -- the replay that sends it again,
    replay_seq  bigint,           -- and the original sequence number
    backfill_id bigint,           -- the job that gives it an X-Delivery of its own
    copy_id     bigint,           -- the dead letter that holds a copy of the event
    PRIMARY KEY (lane_id, batch, seq)
) PARTITION BY RANGE (batch);
ALTER TABLE delivery_run ALTER COLUMN offsets SET STORAGE PLAIN;

-- Attempts.  A run of several has the first attempts of consecutive deliveries of one lane and batch,
-- which succeeded with the same status and error.  The view `attempt` has a row for each.
CREATE TABLE attempt_run (
    lane_id    bigint      NOT NULL,
    batch      bigint      NOT NULL,
    seq        bigint      NOT NULL,            -- of the first delivery
    replica_id bigint      NOT NULL,
    started_at timestamptz NOT NULL,            -- the first attempt
    attempt    integer     NOT NULL,
    count      integer     NOT NULL DEFAULT 1,  -- of deliveries
    elapsed_ms real        NOT NULL,            -- of the first attempt
    status     integer,
    outcome    "char"      NOT NULL CHECK (outcome IN ('d', 'r', 'f')),  -- delivered, retry, refused
    starts_us  integer[],  -- microseconds after started_at, the first is 0; NULL: one delivery
    elapses_ms real[],     -- NULL: one delivery, or one request for all
    error      text,
    -- The stored response, bounded in size.  In a run of several, a value that is an array has one
    -- element for each delivery; another one is the same for all.
    response   jsonb,
    PRIMARY KEY (lane_id, batch, seq, attempt, replica_id)
) PARTITION BY RANGE (batch);
ALTER TABLE attempt_run ALTER COLUMN starts_us SET STORAGE PLAIN,
                        ALTER COLUMN elapses_ms SET STORAGE PLAIN;

-- Before a period is kept no longer, its partitions are detached and dropped.  Those are gone then.
DO $$ DECLARE
    detached regclass;
BEGIN
    PERFORM make_partition(parent, number)
       FROM unnest('{delivery_run,attempt_run}'::regclass[]) AS parent,
            (SELECT DISTINCT substring(c.relname FROM '^(?:delivery|attempt)_([0-9]+)$')::bigint AS number
               FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
              WHERE i.inhparent IN ('delivery'::regclass, 'attempt'::regclass)) partitions
      WHERE number IS NOT NULL;
    FOR detached IN
        SELECT c.oid FROM period p, unnest(p.detaching) AS d(oid) JOIN pg_class c ON c.oid = d.oid
         WHERE p.kind = 'log' AND c.relname ~ '^(delivery|attempt)_[0-9]+$'
           AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid)
    LOOP
        EXECUTE format('DROP TABLE %s', detached);
    END LOOP;
END $$;
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, replay_id, replay_seq, backfill_id, copy_id)
    SELECT lane_id, batch, seq, outbox_id, replay_id, replay_seq, backfill_id, copy_id FROM delivery;
INSERT INTO attempt_run (lane_id, batch, seq, replica_id, started_at, attempt, elapsed_ms, status, outcome,
                         error, response)
    SELECT lane_id, batch, seq, replica_id, started_at, attempt, elapsed_ms, status,
           CASE outcome WHEN 'delivered' THEN 'd' WHEN 'retry' THEN 'r' ELSE 'f' END, error, response
      FROM attempt;
DROP TABLE delivery;
DROP TABLE attempt;

-- By lane: the progress of a replay of a million deliveries is read from the first and the last one in
-- each of its lanes.
CREATE INDEX delivery_run_replay ON delivery_run (replay_id, lane_id, seq) WHERE replay_id IS NOT NULL;
-- By event; other deliveries of an event are found through its batch.
CREATE INDEX delivery_run_repeated ON delivery_run (outbox_id)
 WHERE replay_id IS NOT NULL OR backfill_id IS NOT NULL;
-- By the dead letter whose copy it needs, including replays of replays.
CREATE INDEX delivery_run_copy ON delivery_run (copy_id) WHERE copy_id IS NOT NULL;
-- No success enters it.
CREATE INDEX attempt_run_failed ON attempt_run (lane_id, batch, seq) WHERE outcome <> 'd';

-- Rows as the sequencer and the owners write them, like `counter_row`.
DROP TYPE delivery_row, attempt_row;
CREATE TYPE delivery_run_row AS (
    lane_id     bigint,
    seq         bigint,
    outbox_id   bigint,
    offsets     smallint[],
    replay_id   bigint,
    replay_seq  bigint,
    backfill_id bigint,
    copy_id     bigint
);
CREATE TYPE attempt_run_row AS (
    lane_id        bigint,
    batch          bigint,
    seq            bigint,
    attempt        integer,
    count          integer,
    outcome        "char",
    status         integer,
    error          text,
    started_us     bigint,         -- microseconds since 1970
    elapsed_ms     real,
    starts_us      integer[],
    elapses_ms     real[],
    response_index integer         -- in the distinct responses of the message
);

-- The response to the n-th delivery of a run of several.  An erased one lacks what was erased.
CREATE FUNCTION response_of(response jsonb, n bigint) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT jsonb_strip_nulls(response || jsonb_build_object(
        'body', CASE jsonb_typeof(response -> 'body')
                WHEN 'array' THEN response -> 'body' -> (n - 1)::integer ELSE response -> 'body' END,
        'headers', (
            SELECT nullif(jsonb_strip_nulls(jsonb_object_agg(h.key, CASE jsonb_typeof(h.value)
                              WHEN 'array' THEN h.value -> (n - 1)::integer ELSE h.value END)), '{}')
              FROM jsonb_each(response -> 'headers') AS h)))
$$;

-- A value of a run's response without those elements; a value that the run shares may repeat any of its
-- events, so it goes for all of it.
CREATE FUNCTION without_elements(value jsonb, elements bigint[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT jsonb_agg(CASE WHEN e.n <> ALL (elements) THEN e.value END ORDER BY e.n)
      FROM jsonb_array_elements(CASE jsonb_typeof(value) WHEN 'array' THEN value ELSE '[]' END)
           WITH ORDINALITY AS e(value, n)
    HAVING bool_or(e.n <> ALL (elements) AND e.value <> 'null')
$$;
REVOKE ALL ON FUNCTION without_elements FROM PUBLIC;

-- The response of a run without what receivers said about some of its deliveries.
CREATE FUNCTION without_responses(response jsonb, elements bigint[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT response - 'body' - 'headers' || jsonb_strip_nulls(jsonb_build_object(
        'body', without_elements(response -> 'body', elements),
        'headers', (
            SELECT nullif(jsonb_strip_nulls(jsonb_object_agg(h.key, without_elements(h.value, elements))), '{}')
              FROM jsonb_each(response -> 'headers') AS h)))
$$;
REVOKE ALL ON FUNCTION without_responses FROM PUBLIC;

-- `unnest`, because the planner takes ten rows for an array and a thousand for a series.
CREATE VIEW delivery AS
    SELECT r.lane_id, r.batch, r.seq + u.n - 1 AS seq, r.outbox_id + u.after AS outbox_id, r.replay_id,
           r.replay_seq, r.backfill_id, r.copy_id
      FROM delivery_run r
     CROSS JOIN LATERAL unnest(coalesce(r.offsets, '{0}')) WITH ORDINALITY AS u(after, n);

CREATE VIEW attempt AS
    SELECT r.lane_id, r.batch, r.seq + u.n - 1 AS seq, r.attempt, r.replica_id,
           CASE r.outcome WHEN 'd' THEN 'delivered' WHEN 'r' THEN 'retry' ELSE 'refused' END AS outcome,
           r.status, r.error, r.started_at + u.after_us * interval '1 microsecond' AS started_at,
           coalesce(r.elapses_ms[u.n], r.elapsed_ms) AS elapsed_ms,
           CASE WHEN r.count > 1 THEN response_of(r.response, u.n) ELSE r.response END AS response
      FROM attempt_run r
     CROSS JOIN LATERAL unnest(coalesce(r.starts_us, '{0}')) WITH ORDINALITY AS u(after_us, n);


-- As in 0015_on_missing.sql, on the runs: through the view, 32 deliveries would be sorted to find one.
CREATE OR REPLACE FUNCTION contains_ordinary_event(
    lane bigint, from_batch bigint, first_seq bigint, last_seq bigint
) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM (
               SELECT seq, outbox_id, coalesce(offsets, '{0}') AS offsets, copy_id FROM delivery_run
                WHERE lane_id = lane AND batch >= from_batch AND seq <= last_seq
                  AND seq + coalesce(cardinality(offsets), 1) > first_seq
                ORDER BY batch, seq OFFSET 0) r
         CROSS JOIN LATERAL unnest(r.offsets) WITH ORDINALITY AS u(after, n)
         WHERE r.seq + u.n - 1 BETWEEN first_seq AND last_seq
           AND coalesce((SELECT type FROM outbox WHERE id = r.outbox_id + u.after),
                        (SELECT type FROM dead_letter WHERE id = r.copy_id), '')
               NOT LIKE 'outbox.%');
END $$;

-- --------------------------------------------------------------- partitions

-- As in 0007_roles.sql and 0019_faults.sql, of these tables.
CREATE OR REPLACE FUNCTION end_period(kind text, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    parents regclass[] := CASE end_period.kind WHEN 'events' THEN '{outbox}'::regclass[]
                               ELSE '{batch,delivery_run,attempt_run}'::regclass[] END;
    next_number bigint := end_period.number + 1;
    begins_at bigint := next_number * 100000000000;
    ids regclass := pg_get_serial_sequence('outbox', 'id');
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    IF EXISTS (SELECT FROM unnest(parents) AS of(parent)
                WHERE NOT EXISTS (
                      SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                       WHERE i.inhparent = of.parent AND NOT i.inhdetachpending
                         AND c.relname = (SELECT relname FROM pg_class WHERE oid = of.parent)
                                         || '_' || next_number)) THEN
        RETURN false;
    END IF;
    UPDATE period p SET ended_at = clock_timestamp()
     WHERE p.kind = end_period.kind AND p.number = end_period.number AND p.ended_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO period (kind, number, high)
    SELECT end_period.kind, next_number, b.high FROM batch b ORDER BY b.batch DESC LIMIT 1;
    IF end_period.kind = 'log' THEN
        -- An empty batch, which advances the batch number.
        INSERT INTO batch (batch, high, young)
        SELECT begins_at, b.high, b.young FROM batch b ORDER BY b.batch DESC LIMIT 1;
    ELSIF coalesce(pg_sequence_last_value(ids), 0) < begins_at - 1 THEN
        PERFORM setval(ids, begins_at - 1);
    END IF;
    RETURN true;
END $$;

CREATE OR REPLACE FUNCTION add_partition(parent regclass, number bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    period_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery_run,attempt_run}'::regclass[]) OR number IS NULL
       OR number NOT BETWEEN 0 AND (
           SELECT max(p.number) + 10 FROM period p WHERE p.kind = period_kind) THEN
        RAISE EXCEPTION 'partition % of % may not be created', number, parent
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM make_partition(parent, number);
END $$;

CREATE OR REPLACE FUNCTION empty_partition(parent regclass, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' SET row_security = off AS $$
DECLARE
    period_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
    child regclass := to_regclass(quote_ident(
        (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number));
    setting text := regexp_replace(current_schema(), '^[0-9]|[^A-Za-z0-9_]', '_', 'g') || '.remove';
    before text := coalesce(current_setting(setting, true), '');
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery_run,attempt_run}'::regclass[]) OR child IS NULL
       OR NOT EXISTS (SELECT FROM period p
                       WHERE p.kind = period_kind AND p.number = empty_partition.number
                         AND p.dropped_at NOT BETWEEN clock_timestamp() - interval '1 hour'
                                                  AND clock_timestamp() + interval '1 hour'
                         AND (child::oid = ANY (p.detaching)
                              OR EXISTS (SELECT FROM pg_inherits i
                                          WHERE i.inhrelid = child AND i.inhparent = parent))) THEN
        RAISE EXCEPTION 'partition % of % does not belong to a period that was dropped at least an hour ago',
            number, parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_relation_size(child) = 0 THEN
        RETURN false;
    END IF;
    PERFORM set_config(setting, 'on', true);
    EXECUTE format('TRUNCATE ONLY %s', child);
    PERFORM set_config(setting, before, true);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

CREATE OR REPLACE FUNCTION analyze_parent(parent regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery_run,attempt_run}'::regclass[]) THEN
        RAISE EXCEPTION '% is not a partitioned table of this schema', parent
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('ANALYZE %s', parent);
END $$;

-- -------------------------------------------------------------------- erasure

-- As in 0021_api.sql, of runs: a run loses what the receiver said about the erased deliveries, and
-- what all of its responses have in common, which may repeat any of its events.
--   found: in key order, because the events of two erasures may share a run, and they would lock it in two
--     orders.  256 is the longest run.
--   elements: the deliveries' places in the runs of their attempts, of those that have something left:
--     that is asked of each delivery's own response, or the loop over the steps would not end.
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
    sequenced AS MATERIALIZED (
        SELECT batch FROM positions WHERE NOT late
         UNION
        SELECT b.batch FROM positions p CROSS JOIN LATERAL (
               SELECT batch FROM batch
                WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.id
                ORDER BY batch LIMIT 1) b),
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

-- ---------------------------------------------------------------- privileges

-- As in 0022_shares.sql, with the tables of runs: what could be inserted into the tables before, goes
-- into these.
CREATE OR REPLACE FUNCTION required_privileges(purpose text)
RETURNS TABLE (kind text, name text, privilege text, columns text[])
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY EXECUTE format('
        SELECT n.kind, n.name, n.privilege, coalesce(n.of_columns, (
                   SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
                    WHERE n.all_but IS NOT NULL AND a.attrelid = to_regclass(n.name)
                      AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (n.all_but)))
          FROM (SELECT p.kind, CASE WHEN p.privilege = ''INSERT'' AND p.name IN (''attempt'', ''delivery'')
                                    THEN p.name || ''_run'' ELSE p.name END AS name,
                       p.privilege, p.of_columns, p.all_but
                  FROM %I() p
                 UNION ALL SELECT * FROM added_privileges(%L)) n',
        purpose || '_privileges', purpose);
END $$;

-- As in 0022_shares.sql.
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
        ('{api}', 'function', 'publish_shared', 'EXECUTE', NULL)
      ) AS added(purposes, kind, name, privilege, of_columns)
     WHERE purpose = ANY (purposes)
$$;
