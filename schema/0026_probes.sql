-- Relays stop first.
--
-- A probe is told from an attempt of the delivery's own, and an endpoint may go without probes, and
-- without what its receiver responds.  A relay of an earlier version would do neither.

ALTER TABLE endpoint
    ADD COLUMN probes boolean NOT NULL DEFAULT true,
    ADD COLUMN keep_responses text NOT NULL DEFAULT 'all' CHECK (keep_responses IN ('none', 'failed', 'all'));

-- The delivery log reads a lane's dead letters in its order; ranges are counted.
CREATE INDEX dead_letter_lane ON dead_letter (lane_id, batch, seq) WHERE outbox_id IS NOT NULL;
CREATE INDEX dead_letter_ranges ON dead_letter (endpoint_id, batch) WHERE outbox_id IS NULL;

ALTER TABLE attempt_run
    DROP CONSTRAINT attempt_run_outcome_check,
    -- Delivered, retry, probe, refused.  A probe is a failure between the delivery's own attempts.
    ADD CONSTRAINT attempt_run_outcome_check CHECK (outcome IN ('d', 'r', 'p', 'f'));

-- As in 0024_runs.sql, with probes.
CREATE OR REPLACE VIEW attempt AS
    SELECT r.lane_id, r.batch, r.seq + u.n - 1 AS seq, r.attempt, r.replica_id,
           CASE r.outcome WHEN 'd' THEN 'delivered' WHEN 'r' THEN 'retry' WHEN 'p' THEN 'probe'
                          ELSE 'refused' END AS outcome,
           r.status, r.error, r.started_at + u.after_us * interval '1 microsecond' AS started_at,
           coalesce(r.elapses_ms[u.n], r.elapsed_ms) AS elapsed_ms,
           CASE WHEN r.count > 1 THEN response_of(r.response, u.n) ELSE r.response END AS response
      FROM attempt_run r
     CROSS JOIN LATERAL unnest(coalesce(r.starts_us, '{0}')) WITH ORDINALITY AS u(after_us, n);

-- As in 0025_send_again.sql, and an operator may name the events of a backfill, too.
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
        ('{operator,api}', 'table', 'replay_job', 'INSERT', '{outbox_ids}'),
        ('{api}', 'function', 'publish_shared', 'EXECUTE', NULL)
      ) AS added(purposes, kind, name, privilege, of_columns)
     WHERE purpose = ANY (purposes)
$$;
