-- Relays stop first.
--
-- Chosen events are sent to an endpoint again: a backfill may name its events.  A relay of an earlier
-- version would send everything between them.

ALTER TABLE replay_job ADD COLUMN outbox_ids bigint[];  -- of a backfill: only these events; NULL: all

-- As in 0024_runs.sql, and a token of the API may name them.
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
        ('{api}', 'table', 'replay_job', 'INSERT', '{outbox_ids}'),
        ('{api}', 'function', 'publish_shared', 'EXECUTE', NULL)
      ) AS added(purposes, kind, name, privilege, of_columns)
     WHERE purpose = ANY (purposes)
$$;
