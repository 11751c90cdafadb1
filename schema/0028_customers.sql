-- Relays stop first.
--
-- An endpoint may have a second signature, in the form of another sender, and a contact, which
-- operational events carry with the tenant.  A relay of an earlier version would sign in the form of
-- Standard Webhooks with all secrets, and report each time that an endpoint fails again.

ALTER TABLE endpoint
    -- The given members of the signature, without its secrets: see outbox/core/model/compat.py.
    ADD COLUMN compat jsonb CHECK (jsonb_typeof(compat) = 'object'),
    -- Whom to tell about the endpoint.
    ADD COLUMN contact text CHECK (octet_length(contact) BETWEEN 1 AND 320);

ALTER TABLE endpoint_secret
    -- A secret of the compat signature, whose `secret` is base64 of the key.
    ADD COLUMN compat boolean NOT NULL DEFAULT false;

-- When outbox.endpoint.failing was published last.
ALTER TABLE endpoint_health
    ADD COLUMN failing_reported_at timestamptz;

-- As in 0014_absence.sql, with the tenant and the contact of the endpoint, and for an endpoint that is
-- being fed, which will get the event, too.
CREATE OR REPLACE FUNCTION publish_operational_events(
    types text[], endpoint_ids uuid[], details jsonb[]
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '500ms' AS $$
DECLARE
    subscribed bigint[];
    written bigint;
BEGIN
    SELECT array_agg(t.n) INTO subscribed
      FROM unnest(types, endpoint_ids) WITH ORDINALITY AS t(type, endpoint_id, n)
      LEFT JOIN endpoint e ON e.id = t.endpoint_id
     WHERE EXISTS (
           SELECT FROM (SELECT s.types, s.tenant, s.all_tenants FROM subscription s
                         WHERE s.to_batch IS NULL AND selects_operational_events(s.types)
                         UNION ALL
                        SELECT f.types, f.tenant, f.all_tenants FROM feed f
                         WHERE f.ended_at IS NULL AND selects_operational_events(f.types)) s,
                unnest(s.types) AS p(pattern)
            WHERE (s.all_tenants OR s.tenant IS NOT DISTINCT FROM e.tenant)
              AND p.pattern LIKE 'outbox.%'
              AND t.type ~ ('^' || replace(replace(replace(replace(
                      p.pattern, '.', '\.'), '**', '#'), '*', '[^.]+'), '#', '.+') || '$'));
    IF subscribed IS NULL THEN
        RETURN 0;
    END IF;
    -- A subtransaction: a trigger or constraint of the application that rejects the event
    -- must not roll back the change that it reports.
    BEGIN
        INSERT INTO outbox (event_id, tenant, type, key, payload)
        SELECT overlay(gen_random_uuid()::text PLACING '8' FROM 15)::uuid, e.tenant,
               t.type, t.endpoint_id::text,
               jsonb_strip_nulls(jsonb_build_object(
                   'version', 1, 'at', rfc3339(clock_timestamp()),
                   'endpoint', CASE WHEN t.endpoint_id IS NOT NULL THEN
                       jsonb_build_object('id', t.endpoint_id, 'name', e.name,
                                          'tenant', e.tenant, 'contact', e.contact) END)
                   || CASE WHEN e.tenant IS NOT NULL
                            AND t.details ->> 'failure' IN ('dns', 'egress_refused')
                           -- Do not disclose to tenants which names resolve internally.
                           THEN t.details || '{"failure": "connect"}' ELSE t.details END)
          FROM unnest(types, endpoint_ids, details)
               WITH ORDINALITY AS t(type, endpoint_id, details, n)
          LEFT JOIN endpoint e ON e.id = t.endpoint_id
         WHERE t.n = ANY (subscribed)
         ORDER BY t.n;
        GET DIAGNOSTICS written = ROW_COUNT;
        PERFORM require_stored(written = cardinality(subscribed), 'outbox');
        RETURN written;
    EXCEPTION
    WHEN lock_not_available THEN
        -- No retry one by one: each would wait for the same lock again.
        RAISE WARNING '% operational events were rejected: % (%)',
            cardinality(subscribed), SQLERRM, SQLSTATE;
        RETURN 0;
    WHEN others THEN
        IF cardinality(types) = 1 THEN
            RAISE WARNING 'an operational event was rejected: % (%)', SQLERRM, SQLSTATE;
            RETURN 0;
        END IF;
    END;
    -- One of the events was rejected: publish each by itself.
    written := 0;
    FOR i IN 1 .. cardinality(types) LOOP
        written := written
            + publish_operational_events(types[i:i], endpoint_ids[i:i], details[i:i]);
    END LOOP;
    RETURN written;
END $$;

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
