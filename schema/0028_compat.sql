-- Relays stop first.
--
-- An endpoint may have a second signature, in the form of another sender.  A relay of an earlier
-- version would sign in the form of Standard Webhooks with its secrets.

ALTER TABLE endpoint
    -- The given members of the signature, without its secrets: see outbox/core/model/compat.py.
    ADD COLUMN compat jsonb CHECK (jsonb_typeof(compat) = 'object');

ALTER TABLE endpoint_secret
    -- A secret of the compat signature, whose `secret` is base64 of the key.
    ADD COLUMN compat boolean NOT NULL DEFAULT false;

-- As in 0027_positions.sql, and changes of endpoints add compat secrets.
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
        ('{operator,api}', 'table', 'endpoint_secret', 'INSERT', '{compat}'),
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
