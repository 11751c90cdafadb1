-- Relays stop first.

-- ------------------------------------------------------------------ quotas of tenants

-- What each tenant may have: endpoints and their lanes, schedules, and idempotency keys of its
-- tokens.  NULL: as the row of the tenant '', which is for all tenants; no tenant has this name.  The
-- defaults are those of that row.
CREATE TABLE quota (
    tenant    text   PRIMARY KEY CHECK (octet_length(tenant) <= 255),
    endpoints bigint DEFAULT 100     CHECK (endpoints >= 0),
    lanes     bigint DEFAULT 1024    CHECK (lanes >= 0),
    schedules bigint DEFAULT 100     CHECK (schedules >= 0),
    once_keys bigint DEFAULT 1000000 CHECK (once_keys >= 0),
    CHECK (tenant <> '' OR num_nulls(endpoints, lanes, schedules, once_keys) = 0)
);
INSERT INTO quota (tenant) VALUES ('');

-- Finds the endpoints of a tenant.
CREATE INDEX endpoint_tenant ON endpoint (tenant) WHERE tenant IS NOT NULL;

-- The number of idempotency keys with each prefix of tenants' tokens (`@digest/`), as maintenance
-- has counted them last.
CREATE TABLE idempotency_key_count (
    prefix text   PRIMARY KEY,
    keys   bigint NOT NULL
);

-- Counts them.  The range is that of "@" in the order of code points, by the primary key.
CREATE FUNCTION count_idempotency_keys() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
    WITH counted AS MATERIALIZED (
        SELECT left(key, 34) AS prefix, count(*) AS keys FROM idempotency_key
         WHERE key >= '@' AND key < 'A' GROUP BY 1),
    stored AS (
        INSERT INTO idempotency_key_count (prefix, keys) SELECT prefix, keys FROM counted
            ON CONFLICT (prefix) DO UPDATE SET keys = excluded.keys)
    DELETE FROM idempotency_key_count WHERE prefix NOT IN (SELECT prefix FROM counted)
$$;

-- ------------------------------------------------------------------ lanes that are removed

-- The number of deliveries in removed lanes, so that totals of the installation do not decrease.
CREATE TABLE removed_lanes (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    deliveries bigint  NOT NULL DEFAULT 0
);
INSERT INTO removed_lanes DEFAULT VALUES;

-- Removes at most lanes_max lanes of older generations and of removed endpoints to which nothing
-- refers any more, and returns how many.  None of them gets a delivery again: a batch is written
-- only under a routing version in which its lanes were current.  A lane without a delivery goes at
-- once; another one when the periods of its deliveries were dropped, and its dead letters deleted.
-- The generation's number is not used again, because `endpoint.generation` only increases.
--
-- Nothing is removed from a state that was restored, until new lanes have begun: rows that are
-- absent may still be restored.
--   found: SubPlans with OFFSET 0, which are index lookups in each lane; joins would read all
--     partitions.  Unless the endpoint is removed, a broker's stream needs the end entry of a lane,
--     and a receiver that fetches compares the lanes that it knows with those that are listed: of
--     one that is gone it would not learn that its missing deliveries are not kept any more.
--   owned: a relay that acquires an endpoint requires that it has locked all its lanes, and locks
--     this row first.
CREATE FUNCTION remove_lanes(lanes_max integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off
SET enable_seqscan = off SET jit = off AS $$
DECLARE
    kept_from bigint := (SELECT min(number) * 100000000000 FROM period
                          WHERE kind = 'log' AND dropped_at IS NULL);
    removed record;
BEGIN
    IF kept_from IS NULL OR history_changed() THEN
        RETURN 0;
    END IF;
    WITH found AS MATERIALIZED (
        SELECT l.id, l.endpoint_id, c.last_seq
          FROM endpoint e
         CROSS JOIN LATERAL (
               SELECT id, endpoint_id FROM lane
                WHERE endpoint_id = e.id
                  AND generation < e.generation + (e.state = 'removed')::integer OFFSET 0) l
         CROSS JOIN LATERAL (
               SELECT last_seq FROM lane_counter WHERE lane_id = l.id OFFSET 0) c
         CROSS JOIN LATERAL (
               SELECT acked_seq, floor_batch, end_seq FROM lane_progress
                WHERE lane_id = l.id OFFSET 0) p
         WHERE c.last_seq = p.acked_seq AND (c.last_seq = 0 OR p.floor_batch < kept_from)
           AND (e.state = 'removed'
                OR (p.end_seq IS NOT NULL OR e.url ~ '^https?:')
                   AND (c.last_seq = 0 OR NOT EXISTS (
                        SELECT FROM fetch_token WHERE endpoint_id = e.id OFFSET 0)))
           AND NOT EXISTS (SELECT FROM lane_block WHERE lane_id = l.id OFFSET 0)
           AND NOT EXISTS (SELECT FROM dead_letter WHERE lane_id = l.id OFFSET 0)
           AND NOT EXISTS (
               SELECT FROM delivery WHERE lane_id = l.id AND batch >= kept_from OFFSET 0)
           AND NOT EXISTS (
               SELECT FROM attempt WHERE lane_id = l.id AND batch >= kept_from OFFSET 0)
         LIMIT lanes_max),
    owned AS MATERIALIZED (
        SELECT endpoint_id FROM ownership
         WHERE endpoint_id IN (SELECT endpoint_id FROM found)
         ORDER BY endpoint_id FOR NO KEY UPDATE SKIP LOCKED)
    SELECT array_agg(f.id) AS ids, sum(f.last_seq)::bigint AS deliveries, count(*) AS lanes
      INTO removed FROM found f JOIN owned USING (endpoint_id);
    DELETE FROM lane_receipt WHERE lane_id = ANY (removed.ids);
    DELETE FROM lane_progress WHERE lane_id = ANY (removed.ids);
    DELETE FROM lane_counter WHERE lane_id = ANY (removed.ids);
    DELETE FROM lane WHERE id = ANY (removed.ids);
    UPDATE removed_lanes r SET deliveries = r.deliveries + removed.deliveries
     WHERE removed.deliveries > 0;
    RETURN removed.lanes;
END $$;

-- ------------------------------------------------------------------ privileges

-- As in 0021_api.sql, with the tables and functions that were added since.

CREATE OR REPLACE FUNCTION read_only_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT 'table', t.name, 'SELECT', NULL::text[], NULL::text[]
      FROM unnest('{attempt,batch,cursor,dead_letter,delivery,delivery_history,endpoint_health,
                    event_account,event_block,event_void,future_event,gap,idempotency_key,
                    idempotency_key_count,incarnation,installation_history,journal,lag_report,lane,
                    lane_block,lane_counter,lane_progress,lane_receipt,lock,migration,odometer,
                    odometer_mark,outbox,ownership,period,quota,removed_lanes,replay,replay_job,
                    replay_job_endpoint,replica,schedule,subscription}'::text[]) AS t(name)
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

CREATE OR REPLACE FUNCTION change_privileges() RETURNS SETOF required_privilege
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
        ('table', 'quota', 'INSERT', NULL, NULL),
        ('table', 'quota', 'UPDATE', '{endpoints,lanes,schedules,once_keys}', NULL),
        ('table', 'quota', 'DELETE', NULL, NULL),
        ('sequence', 'replay_job_id_seq', 'SELECT', NULL, NULL),
        ('sequence', 'replay_job_id_seq', 'UPDATE', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{abort_unless,add_ownership,change_privileges,erase_responses,first_generation,
                    lock_ownership,next_generation,resequence}'::text[]) AS f(name)
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
                    advance_sequences,analyze_parent,blocks_to_examine,count_idempotency_keys,
                    drop_period,empty_partition,end_period,erase_responses,examine_block,
                    first_generation,guard_events,next_generation,publish_operational_event,
                    publish_operational_events,remove_lanes,settle_period,summarize}'::text[]) AS f(name)
$$;
