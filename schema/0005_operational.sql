-- Programs of version 4 go on working.
--
-- Operational events: what the relay tells about itself, as events in its own outbox.
--
-- They are written by the statement that makes the change they tell of, and only while
-- somebody wants them.  Which changes are told is said in outbox/core/delivery/operational_events.py.

-- Whether a subscription names operational events at all.
CREATE FUNCTION names_operational(types text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (SELECT FROM unnest(types) AS t(pattern) WHERE t.pattern LIKE 'outbox.%')
$$;
REVOKE ALL ON FUNCTION names_operational FROM PUBLIC;

-- Mostly empty: so that it costs a look at one page to find that nobody wants them.
CREATE INDEX subscription_operational ON subscription (endpoint_id)
 WHERE to_batch IS NULL AND names_operational(types);

-- Whether there is an ordinary event among some numbers of a lane; none of them lies
-- below the batch.  Of an event that is gone, a dead letter's copy may tell the type.
CREATE FUNCTION holds_ordinary(lane bigint, from_batch bigint, first_seq bigint, last_seq bigint)
RETURNS boolean
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
REVOKE ALL ON FUNCTION holds_ordinary FROM PUBLIC;

-- As receivers see times and lanes.
CREATE FUNCTION rfc3339(at timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
$$;
CREATE FUNCTION lane_name(endpoint_id uuid, generation bigint, slot integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT left(replace(endpoint_id::text, '-', ''), 12) || '-' || generation || '-' || slot
$$;
REVOKE ALL ON FUNCTION rfc3339, lane_name FROM PUBLIC;

-- Writes those of some operational events that somebody wants; how many that were.  Each
-- is of a type, about an endpoint or none, and says something.  A function, and not an
-- INSERT in the statements that call it, because that would ring for the relay with every
-- one of them, whether it inserts anything or not; and many at once, because a storm of
-- dead letters comes at once.
--
-- They belong to their endpoint's tenant, as what they tell of does.  Their event_id is of
-- version 8: publish() refuses these types, and so does the table with an event_id of any
-- other version.  Who writes to the table has no right on event_id, which is of version 4
-- by default.
--
-- Nor does it wait for a lock for long: acknowledgements wait with it.
CREATE FUNCTION announce_all(types text[], about uuid[], told jsonb[]) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '500ms' AS $$
DECLARE
    wanted bigint[];
    written bigint;
BEGIN
    SELECT array_agg(t.n) INTO wanted
      FROM unnest(types, about) WITH ORDINALITY AS t(type, about, n)
      LEFT JOIN endpoint e ON e.id = t.about
     WHERE EXISTS (
           SELECT FROM subscription s, unnest(s.types) AS p(pattern)
            WHERE s.to_batch IS NULL AND names_operational(s.types)
              AND (s.all_tenants OR s.tenant IS NOT DISTINCT FROM e.tenant)
              AND p.pattern LIKE 'outbox.%'
              AND t.type ~ ('^' || replace(replace(replace(replace(
                      p.pattern, '.', '\.'), '**', '#'), '*', '[^.]+'), '#', '.+') || '$'));
    IF wanted IS NULL THEN
        RETURN 0;
    END IF;
    -- What is told must not undo what it tells of: a trigger or a constraint of the
    -- application's that refuses it would otherwise undo each attempt to write that down.
    BEGIN
        INSERT INTO outbox (event_id, tenant, type, key, payload)
        SELECT overlay(gen_random_uuid()::text PLACING '8' FROM 15)::uuid, e.tenant,
               t.type, t.about::text,
               jsonb_strip_nulls(jsonb_build_object(
                   'version', 1, 'at', rfc3339(clock_timestamp()),
                   'endpoint', CASE WHEN t.about IS NOT NULL THEN
                       jsonb_build_object('id', t.about, 'name', e.name) END)
                   || CASE WHEN e.tenant IS NOT NULL
                            AND t.told ->> 'failure' IN ('dns', 'egress_refused')
                           -- Tenants are not told which names lead inside.
                           THEN t.told || '{"failure": "connect"}' ELSE t.told END)
          FROM unnest(types, about, told) WITH ORDINALITY AS t(type, about, told, n)
          LEFT JOIN endpoint e ON e.id = t.about
         WHERE t.n = ANY (wanted)
         ORDER BY t.n;
        GET DIAGNOSTICS written = ROW_COUNT;
        RETURN written;
    EXCEPTION
    WHEN lock_not_available THEN
        -- Nor would one after the other get it, and each would wait anew.
        RAISE WARNING '% operational events were refused: % (%)', cardinality(wanted), SQLERRM, SQLSTATE;
        RETURN 0;
    WHEN others THEN
        IF cardinality(types) = 1 THEN
            RAISE WARNING 'an operational event was refused: % (%)', SQLERRM, SQLSTATE;
            RETURN 0;
        END IF;
    END;
    -- One of them was refused: each for itself.
    written := 0;
    FOR i IN 1 .. cardinality(types) LOOP
        written := written + announce_all(types[i:i], about[i:i], told[i:i]);
    END LOOP;
    RETURN written;
END $$;
REVOKE ALL ON FUNCTION announce_all FROM PUBLIC;

-- One; whether somebody wanted it.
CREATE FUNCTION announce(type text, about uuid, told jsonb) RETURNS boolean
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT announce_all(ARRAY[type], ARRAY[about], ARRAY[told]) > 0
$$;
REVOKE ALL ON FUNCTION announce FROM PUBLIC;
