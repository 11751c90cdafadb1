-- Compatible with programs of version 4.
--
-- Operational events: events about the relay itself, published to its own outbox.
--
-- They are written in the statement that makes the reported change, and only while a
-- subscription selects them.  outbox/core/delivery/operational_events.py lists the types.

-- Returns whether a subscription's type patterns name operational events explicitly.
CREATE FUNCTION selects_operational_events(types text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (SELECT FROM unnest(types) AS t(pattern) WHERE t.pattern LIKE 'outbox.%')
$$;
REVOKE ALL ON FUNCTION selects_operational_events FROM PUBLIC;

-- Usually empty: one page read shows that no endpoint subscribes to operational events.
CREATE INDEX subscription_operational ON subscription (endpoint_id)
 WHERE to_batch IS NULL AND selects_operational_events(types);

-- Returns whether a range of a lane's sequence numbers contains an ordinary (not operational)
-- event.  No sequence number of the range is in a batch below from_batch.  The type of a
-- dropped event comes from the dead letter's copy.
CREATE FUNCTION contains_ordinary_event(
    lane bigint, from_batch bigint, first_seq bigint, last_seq bigint
) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM (
               SELECT outbox_id, copy_id FROM delivery
                WHERE lane_id = lane AND batch >= from_batch AND seq BETWEEN first_seq AND last_seq
                ORDER BY batch, seq OFFSET 0) d
         WHERE coalesce((SELECT type FROM outbox WHERE id = d.outbox_id),
                        (SELECT type FROM dead_letter WHERE id = d.copy_id)) NOT LIKE 'outbox.%');
END $$;
REVOKE ALL ON FUNCTION contains_ordinary_event FROM PUBLIC;

-- Timestamps and lane names as receivers see them.
CREATE FUNCTION rfc3339(at timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
$$;
CREATE FUNCTION lane_name(endpoint_id uuid, generation bigint, slot integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT left(replace(endpoint_id::text, '-', ''), 12) || '-' || generation || '-' || slot
$$;
REVOKE ALL ON FUNCTION rfc3339, lane_name FROM PUBLIC;

-- Publishes operational events to which an endpoint subscribes; returns how many.  An event
-- has a type, an endpoint or NULL, and details.  A function, because an INSERT in the calling
-- statement would fire the statement trigger that notifies the relay even when it inserts no
-- row.  It takes arrays, because dead letters come in bursts.
--
-- The events belong to their endpoint's tenant.  Their event_id is of UUID version 8:
-- publish() rejects these types, and the table rejects them with any other version.
-- Producers have no INSERT privilege on event_id, which is of version 4 by default.
--
-- lock_timeout bounds the wait, because acknowledgements wait for this statement.
CREATE FUNCTION publish_operational_events(types text[], endpoint_ids uuid[], details jsonb[])
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '500ms' AS $$
DECLARE
    subscribed bigint[];
    written bigint;
BEGIN
    SELECT array_agg(t.n) INTO subscribed
      FROM unnest(types, endpoint_ids) WITH ORDINALITY AS t(type, endpoint_id, n)
      LEFT JOIN endpoint e ON e.id = t.endpoint_id
     WHERE EXISTS (
           SELECT FROM subscription s, unnest(s.types) AS p(pattern)
            WHERE s.to_batch IS NULL AND selects_operational_events(s.types)
              AND (s.all_tenants OR s.tenant IS NOT DISTINCT FROM e.tenant)
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
                       jsonb_build_object('id', t.endpoint_id, 'name', e.name) END)
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
REVOKE ALL ON FUNCTION publish_operational_events FROM PUBLIC;

-- Publishes one operational event; returns whether an endpoint subscribes to it.
CREATE FUNCTION publish_operational_event(type text, endpoint_id uuid, details jsonb)
RETURNS boolean
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT publish_operational_events(ARRAY[type], ARRAY[endpoint_id], ARRAY[details]) > 0
$$;
REVOKE ALL ON FUNCTION publish_operational_event FROM PUBLIC;
