-- Relays stop first.
--
-- The purpose `api`, for the process that serves the API, the page and receivers (`outbox api`).
-- Relays do not need what it needs any more: a relay of an older version serves the API itself, with
-- privileges that this migration revokes.

-- Totals of the installation in intervals of ten seconds, for an hour; see
-- outbox/store/installation_history.py.
--
-- A ring: the row with number n replaces the one with number n - 360, so that the table does not grow.
-- The numbers have the order in which the rows were written, whatever the clock did.
CREATE TABLE installation_history (
    slot       smallint    PRIMARY KEY CHECK (slot BETWEEN 0 AND 359),  -- n % 360
    n          bigint      NOT NULL,
    at         timestamptz NOT NULL,  -- end of the interval
    seconds    float8,                -- its length; NULL: unknown, and there are no counts
    events     bigint,                -- events sequenced in it
    deliveries bigint,                -- deliveries created in it
    completed  bigint,                -- deliveries acknowledged or dead-lettered in it
    pending    bigint      NOT NULL,  -- pending deliveries at its end
    -- From these the counts of the next row are computed.
    batch      bigint      NOT NULL,  -- the last batch
    sequenced  bigint      NOT NULL,  -- the sum of the lanes' last sequence numbers
    acked      bigint      NOT NULL   -- the sum of the lanes' checkpoints
) WITH (fillfactor = 50);

-- ------------------------------------------------ SECURITY DEFINER functions

-- What operators and the API write to leases and to the log: each does one thing, so that their
-- roles have no privilege there but to read.

-- Adds the ownership of new endpoints: any relay can acquire it.
CREATE FUNCTION add_ownership(endpoint_ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
    INSERT INTO ownership (endpoint_id) SELECT unnest(endpoint_ids)
$$;

-- Locks the ownership of endpoints until the transaction ends, and returns its epochs.  In endpoint
-- order, as every statement that locks several.
CREATE FUNCTION lock_ownership(endpoint_ids uuid[]) RETURNS TABLE (endpoint_id uuid, epoch bigint)
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
    SELECT o.endpoint_id, o.epoch FROM ownership o
     WHERE o.endpoint_id = ANY (lock_ownership.endpoint_ids)
     ORDER BY o.endpoint_id FOR NO KEY UPDATE
$$;

-- Erases response bodies and headers of erased events; repeat it while it returns attempts_max rows,
-- one per attempt.  Rows that owners write are locked with SKIP LOCKED, so that owners do not wait;
-- `erase_leftovers` of the relay erases what is skipped.
--
--   event: those of the events that are erased.  The row of one may be gone: then its dead letters,
--     which have no contents, show it.
--   positions: for each event, the first batch with high >= id; `late` if the event was in a gap.
--   sequenced: the batches that contain them: that one, or the one that found a late event.
--   delivered: the deliveries in these batches, and those of replays.
--   found, erased: stored responses of attempts.  The planner overestimates the deliveries, and
--     would read the whole log of attempts for them; LIMIT also limits its estimate.
--   retrying, cleared: the retry state of lanes.  failing, reset: endpoints' circuit breakers.
--
-- Rows are locked in key order, as in every statement that locks several, to avoid deadlocks.
-- MATERIALIZED, OFFSET 0, LIMIT 1 and the settings keep each step an index lookup: any other join
-- would read all partitions of a table.
CREATE FUNCTION erase_responses(event_ids bigint[], attempts_max integer)
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
        SELECT lane_id, batch, seq FROM delivery
         WHERE outbox_id = ANY (ARRAY(SELECT id FROM event))
           AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)),
    found AS MATERIALIZED (
        SELECT a.*
          FROM delivered g
         CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq, attempt, replica_id FROM attempt
                WHERE lane_id = g.lane_id AND batch = g.batch AND seq = g.seq
                  AND response ?| '{body,headers}' OFFSET 0) a
         LIMIT attempts_max),
    erased AS (
        UPDATE attempt a SET response = a.response - 'body' - 'headers'
          FROM found f
         WHERE a.lane_id = f.lane_id AND a.batch = f.batch AND a.seq = f.seq
           AND a.attempt = f.attempt AND a.replica_id = f.replica_id
        RETURNING a.lane_id),
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
    SELECT lane_id FROM erased
$$;

-- Returns the committed events that some batches have skipped, because they had declared their ids
-- dead.  ids: all of them.  missing: those without a delivery; the others would get a second one.
-- LATERAL: an index lookup for each range of ids.
CREATE FUNCTION skipped_events(of_batches bigint[])
RETURNS TABLE (batch bigint, ids int8multirange, missing int8multirange)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH skipped AS MATERIALIZED (
        SELECT b.batch, o.id
          FROM batch b
         CROSS JOIN unnest(b.dead) AS dead(ids)
         CROSS JOIN LATERAL (
               SELECT id FROM outbox
                WHERE id >= lower(dead.ids) AND id < upper(dead.ids) OFFSET 0) o
         WHERE b.batch = ANY (of_batches)),
    sequenced AS MATERIALIZED (
        SELECT DISTINCT outbox_id AS id FROM delivery
         WHERE replay_id IS NULL AND backfill_id IS NULL
           AND outbox_id IN (SELECT id FROM skipped))
    SELECT s.batch, range_agg(int8range(s.id, s.id, '[]')),
           coalesce(range_agg(int8range(s.id, s.id, '[]'))
                        FILTER (WHERE s.id NOT IN (SELECT id FROM sequenced)), '{}')
      FROM skipped s GROUP BY s.batch ORDER BY s.batch
$$;

-- Lets the next batches sequence the skipped events of some batches, which must still have the
-- planned ids: those without a delivery become open gaps.  Relays cache the open gaps, so all
-- registrations end, as those of expired replicas do.
CREATE FUNCTION resequence(of_batches bigint[], planned_ids text[], actor text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    skipped record;
BEGIN
    -- The order of every change; no batch is written meanwhile.
    PERFORM FROM cursor FOR UPDATE;
    -- Relays that write wait, and are fenced off then.
    PERFORM FROM replica ORDER BY id FOR UPDATE;
    PERFORM FROM ownership ORDER BY endpoint_id FOR NO KEY UPDATE;
    -- No dead ids are counted meanwhile.
    PERFORM FROM event_account FOR UPDATE;
    SELECT array_agg(s.batch ORDER BY s.batch) AS batches,
           array_agg(s.ids::text ORDER BY s.batch) AS ids,
           array_agg(s.missing::text ORDER BY s.batch) AS missing
      INTO skipped FROM skipped_events(of_batches) s;
    PERFORM abort_unless(skipped.ids = planned_ids);
    -- Ids that are counted already are not dead any more.
    PERFORM discount_dead_ids(range_agg(part.ids))
       FROM unnest(skipped.batches, skipped.ids) AS s(batch, ids),
            unnest(s.ids::int8multirange) AS part(ids)
      WHERE s.batch <= (SELECT batch FROM event_account);
    UPDATE batch b SET dead = b.dead - s.ids::int8multirange
      FROM unnest(skipped.batches, skipped.ids) AS s(batch, ids) WHERE b.batch = s.batch;
    INSERT INTO gap (lo, hi)
    SELECT lower(open.ids), upper(open.ids) - 1
      FROM (SELECT range_agg(part.ids) AS ids
              FROM unnest(skipped.missing) AS s(ids),
                   unnest(s.ids::int8multirange) AS part(ids)) missing,
           unnest(missing.ids) AS open(ids);
    IF NOT FOUND THEN
        RETURN;
    END IF;
    WITH released AS (
        UPDATE ownership o SET replica_id = NULL, epoch = o.epoch + 1
          FROM replica r WHERE r.id = o.replica_id
        RETURNING o.endpoint_id, o.epoch, r.id, r.name)
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT 'endpoint_released', resequence.actor, endpoint_id,
           jsonb_build_object('epoch', epoch, 'replica', id, 'reason', 'events resequenced',
                              'relay', name)
      FROM released;
    DELETE FROM replica;
    -- The leader must not write the batch after the one it knows.
    UPDATE cursor SET writer = NULL;
END $$;

-- ------------------------------------------------------------------ privileges

-- The privileges of each purpose, as of this version; 0007_roles.sql explains them.

CREATE OR REPLACE FUNCTION producer_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    VALUES
        ('table', 'outbox', 'INSERT',
         '{tenant,type,key,payload,body,content_type,headers,expires_at}'::text[], NULL::text[])
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{claim_once,payload_bytes_max,publish,publish_checked,publish_event,
                    publish_events,publish_many,publish_text,reset_once}'::text[]) AS f(name)
$$;

-- Privileges to read the tables, common to relay, operator, reader and api.
CREATE OR REPLACE FUNCTION read_only_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT 'table', t.name, 'SELECT', NULL::text[], NULL::text[]
      FROM unnest('{attempt,batch,cursor,dead_letter,delivery,delivery_history,endpoint_health,
                    event_account,event_block,event_void,future_event,gap,idempotency_key,
                    incarnation,installation_history,journal,lag_report,lane,lane_block,
                    lane_counter,lane_progress,lane_receipt,lock,migration,odometer,odometer_mark,
                    outbox,ownership,period,replay,replay_job,replay_job_endpoint,replica,schedule,
                    subscription}'::text[]) AS t(name)
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], '{headers,identity}'::text[]),
        ('table', 'endpoint_secret', 'SELECT', NULL, '{secret}'),
        ('table', 'token', 'SELECT', NULL, '{hash}'),
        ('table', 'fetch_token', 'SELECT', NULL, '{hash}'),
        ('sequence', 'outbox_id_seq', 'SELECT', NULL, NULL),
        ('sequence', 'wakeup', 'SELECT', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{account,accounted_ids,block_ids,contains_ordinary_event,count_secrets_by_key,
                    expected_events,header_names,history_changed,incarnation_holds,insert_filters,
                    lane_name,matches_filter,missing_guards,observed_before,open_ids,
                    payload_bytes_max,read_only_privileges,require_stored,required_privileges,
                    rfc3339,selects_operational_events,sequences_behind,server_fence,
                    server_identity,server_timeline,skipped_events,suppressed_insert,
                    unsequenced_events}'::text[]) AS f(name)
$$;

CREATE OR REPLACE FUNCTION reader_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM read_only_privileges()
    UNION ALL VALUES
        ('table', 'adoption', 'SELECT', NULL::text[], NULL::text[]),
        ('table', 'adopted_row', 'SELECT', NULL, NULL)
$$;

-- Privileges to change endpoints, dead letters, schedules, tokens and the like, common to operator
-- and api.  The secrets are read to sign a test delivery, a preview or what a receiver fetches, and
-- to plan a change.
CREATE FUNCTION change_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM read_only_privileges()
    UNION ALL VALUES
        ('table', 'adoption', 'SELECT', NULL::text[], NULL::text[]),
        ('table', 'adopted_row', 'SELECT', NULL, NULL),
        ('table', 'endpoint', 'SELECT', '{headers,identity}', NULL),
        ('table', 'endpoint', 'INSERT', NULL,
         '{state,state_at,state_comment,generation,resumes,created_at,identity,identity_about}'),
        ('table', 'endpoint', 'UPDATE', NULL, '{id,created_at}'),
        ('table', 'endpoint_secret', 'SELECT', '{secret}', NULL),
        ('table', 'endpoint_secret', 'INSERT', '{endpoint_id,id,secret,public_key}', NULL),
        ('table', 'endpoint_secret', 'UPDATE', '{expires_at}', NULL),
        ('table', 'endpoint_secret', 'DELETE', NULL, NULL),
        ('table', 'subscription', 'INSERT',
         '{endpoint_id,from_batch,types,tenant,all_tenants,filter}', NULL),
        ('table', 'subscription', 'UPDATE', '{to_batch}', NULL),
        ('table', 'subscription', 'DELETE', NULL, NULL),
        ('table', 'lane', 'INSERT', '{endpoint_id,generation,slot}', NULL),
        ('table', 'lane', 'UPDATE', '{skip_seq,repair,repair_seq}', NULL),
        -- The first rows of new lanes and endpoints; only their owners write them after that.
        ('table', 'lane_counter', 'INSERT', '{lane_id,by_xid}', NULL),
        ('table', 'lane_progress', 'INSERT', '{lane_id,endpoint_id,floor_batch,epoch}', NULL),
        ('table', 'endpoint_health', 'INSERT', '{endpoint_id}', NULL),
        ('table', 'lane_block', 'DELETE', NULL, NULL),
        ('table', 'cursor', 'UPDATE', '{version,erasures,timeline,identity}', NULL),
        ('table', 'dead_letter', 'UPDATE',
         '{state,payload,body,content_type,headers,last_response,erased_at}', NULL),
        ('table', 'replay_job', 'INSERT',
         '{id,kind,endpoint,types,tenant,reason,since,until,rate_per_s,requested_by,gaps}', NULL),
        ('table', 'replay_job', 'UPDATE', '{state,ended_at}', NULL),
        ('table', 'replay_job_endpoint', 'INSERT',
         '{job_id,endpoint_id,first_id,next_id,last_id,expected,from_id}', NULL),
        ('table', 'replay', 'INSERT',
         '{job_id,endpoint_id,dead_id,next_seq,next_batch,to_seq}', NULL),
        ('table', 'replay', 'UPDATE', '{to_seq}', NULL),
        ('table', 'replay', 'DELETE', NULL, NULL),
        ('table', 'schedule', 'INSERT',
         '{tenant,type,key,payload,headers,name,cron,timezone,misfire,grace_s,overlap,state_by,next_at,
           due_at}', NULL),
        ('table', 'schedule', 'UPDATE', NULL, '{id,name,created_at}'),
        ('table', 'schedule', 'DELETE', NULL, NULL),
        ('table', 'idempotency_key', 'UPDATE', '{expires_at,resets}', NULL),
        ('table', 'future_event', 'DELETE', NULL, NULL),
        -- Events can be erased, not rewritten; only the sequence assigns ids.
        ('table', 'outbox', 'UPDATE', '{payload,body,content_type,headers,erased_at}', NULL),
        ('table', 'outbox', 'INSERT', '{event_id,tenant,type,key,payload,headers}', NULL),
        -- The writer cannot set the time or the session's role.
        ('table', 'journal', 'INSERT', '{kind,actor,endpoint_id,data,request}', NULL),
        ('table', 'token', 'INSERT',
         '{name,hash,scopes,tenant,created_by,created_at,expires_at}', NULL),
        ('table', 'token', 'UPDATE', '{revoked_at,revoked_by}', NULL),
        ('sequence', 'replay_job_id_seq', 'SELECT', NULL, NULL),
        ('sequence', 'replay_job_id_seq', 'UPDATE', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{abort_unless,add_ownership,change_privileges,erase_responses,first_generation,
                    lock_ownership,next_generation,resequence}'::text[]) AS f(name)
$$;

CREATE OR REPLACE FUNCTION operator_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM change_privileges()
    UNION ALL VALUES
        -- A key rotation encrypts secrets anew.
        ('table', 'endpoint_secret', 'UPDATE', '{secret}'::text[], NULL::text[]),
        ('table', 'fetch_token', 'INSERT', '{endpoint_id,hash,created_by}', NULL),
        ('table', 'fetch_token', 'UPDATE', '{expires_at}', NULL),
        ('table', 'fetch_token', 'DELETE', NULL, NULL)
$$;

-- The page docs/reference/api-role.md says which route needs each.
CREATE FUNCTION api_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM change_privileges()
    UNION ALL VALUES
        -- Authentication: tokens are looked up by hash.
        ('table', 'token', 'SELECT', '{hash}'::text[], NULL::text[]),
        ('table', 'token', 'UPDATE', '{last_used_at}', NULL),
        ('table', 'fetch_token', 'SELECT', '{hash}', NULL),
        ('table', 'fetch_token', 'UPDATE', '{last_used_at}', NULL),
        ('function', 'publish_events', 'EXECUTE', NULL, NULL)
$$;

CREATE OR REPLACE FUNCTION relay_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM read_only_privileges()
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], NULL::text[]),
        ('table', 'endpoint', 'UPDATE', '{state,state_at,state_by,state_comment,generation}', NULL),
        ('table', 'endpoint_secret', 'SELECT', NULL, NULL),
        ('table', 'endpoint_secret', 'DELETE', NULL, NULL),
        ('table', 'subscription', 'UPDATE', '{to_batch,filter_stopped_at,filter_stopped_reason}',
         NULL),
        ('table', 'lane', 'INSERT', NULL, NULL),
        ('table', 'lane', 'UPDATE', '{repair,repair_seq}', NULL),
        ('table', 'lane_counter', 'INSERT', NULL, NULL),
        ('table', 'lane_counter', 'UPDATE', NULL, NULL),
        ('table', 'lane_progress', 'INSERT', NULL, NULL),
        ('table', 'lane_progress', 'UPDATE', NULL, NULL),
        ('table', 'lane_receipt', 'INSERT', NULL, NULL),
        ('table', 'lane_receipt', 'UPDATE', NULL, NULL),
        ('table', 'lane_block', 'INSERT', NULL, NULL),
        ('table', 'lane_block', 'DELETE', NULL, NULL),
        ('table', 'endpoint_health', 'UPDATE', NULL, NULL),
        ('table', 'ownership', 'UPDATE', NULL, NULL),
        ('table', 'replica', 'INSERT', NULL, NULL),
        ('table', 'replica', 'UPDATE', NULL, NULL),
        ('table', 'replica', 'DELETE', NULL, NULL),
        ('table', 'cursor', 'UPDATE', NULL, NULL),
        ('table', 'lock', 'UPDATE', '{holder,token,expires_at}', NULL),
        ('table', 'lag_report', 'UPDATE', NULL, NULL),
        ('table', 'odometer', 'INSERT', NULL, NULL),
        ('table', 'odometer', 'UPDATE', NULL, NULL),
        ('table', 'odometer_mark', 'INSERT', NULL, NULL),
        ('table', 'odometer_mark', 'UPDATE', NULL, NULL),
        ('table', 'odometer_mark', 'DELETE', NULL, NULL),
        ('table', 'incarnation', 'INSERT', NULL, NULL),
        ('table', 'incarnation', 'UPDATE', NULL, NULL),
        ('table', 'gap', 'INSERT', NULL, NULL),
        ('table', 'gap', 'DELETE', NULL, NULL),
        -- The log is append-only, except for erasure.
        ('table', 'batch', 'INSERT', NULL, NULL),
        ('table', 'delivery', 'INSERT', NULL, NULL),
        ('table', 'attempt', 'INSERT', NULL, NULL),
        ('table', 'delivery_history', 'INSERT', NULL, NULL),
        ('table', 'delivery_history', 'UPDATE', NULL, NULL),
        ('table', 'delivery_history', 'DELETE', NULL, NULL),
        ('table', 'installation_history', 'INSERT', NULL, NULL),
        ('table', 'installation_history', 'UPDATE', NULL, NULL),
        ('table', 'journal', 'INSERT', '{kind,actor,endpoint_id,data}', NULL),
        ('table', 'dead_letter', 'INSERT', NULL, NULL),
        ('table', 'dead_letter', 'UPDATE', NULL, NULL),
        ('table', 'dead_letter', 'DELETE', NULL, NULL),
        ('table', 'replay_job', 'UPDATE', NULL, NULL),
        ('table', 'replay_job_endpoint', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'INSERT', NULL, NULL),
        ('table', 'replay', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'DELETE', NULL, NULL),
        -- Schedules, delayed events and operational events.
        ('table', 'outbox', 'INSERT',
         '{event_id,tenant,type,key,payload,body,content_type,headers,expires_at}', NULL),
        ('table', 'future_event', 'UPDATE', '{retry_at,problem}', NULL),
        ('table', 'future_event', 'DELETE', NULL, NULL),
        ('table', 'schedule', 'UPDATE',
         '{next_at,due_at,last_at,last_run_at,last_outbox_id,last_event_id}', NULL),
        -- For row locks: expired idempotency keys are deleted.
        ('table', 'idempotency_key', 'UPDATE', '{expires_at}', NULL),
        ('table', 'idempotency_key', 'DELETE', NULL, NULL),
        ('sequence', 'wakeup', 'UPDATE', NULL, NULL),
        ('sequence', 'replica_id_seq', 'USAGE', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{abort_unless,account_batches,add_partition,advance_lane_counter,
                    advance_sequences,analyze_parent,blocks_to_examine,drop_period,empty_partition,
                    end_period,erase_responses,examine_block,first_generation,guard_events,
                    next_generation,publish_operational_event,publish_operational_events,
                    settle_period,summarize}'::text[]) AS f(name)
$$;

-- As in 0007_roles.sql: each purpose has all of its privileges in one function again.
CREATE OR REPLACE FUNCTION required_privileges(purpose text)
RETURNS TABLE (kind text, name text, privilege text, columns text[])
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY EXECUTE format('
        SELECT n.kind, n.name, n.privilege, coalesce(n.of_columns, (
                   SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
                    WHERE n.all_but IS NOT NULL AND a.attrelid = to_regclass(n.name)
                      AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (n.all_but)))
          FROM %I() n', purpose || '_privileges');
END $$;

-- As in 0007_roles.sql, with `api`.
CREATE OR REPLACE FUNCTION role_purposes() RETURNS TABLE (purpose text, role regrole)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT w.purpose, acl.grantee::regrole
      FROM unnest('{producer,relay,operator,reader,api}'::text[]) AS w(purpose)
      JOIN pg_proc p ON p.pronamespace = quote_ident(current_schema())::regnamespace
       AND p.proname = w.purpose || '_privileges'
     CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
     WHERE acl.grantee NOT IN (0, p.proowner)
$$;

CREATE FUNCTION grant_api(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT grant_purpose('api', role) $$;
