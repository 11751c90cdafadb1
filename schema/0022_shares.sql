-- Relays stop first.
--
-- What keeps one tenant from taking what others need.  What tenants' tokens publish above their share
-- is held in future_event, and moved into the outbox at the tenant's pace: a relay of an older version
-- would move it at once, and out of order.

-- --------------------------------------------------------------- held events

-- cost: the deliveries that the event is charged with; NULL: it is an application's, and not paced.
-- held_before: the sum of the costs that the tenant's tokens had held before this event; NULL: not
--   held, it waits for its deliver_at.
ALTER TABLE future_event
    ADD COLUMN cost        integer CHECK (cost >= 0),
    ADD COLUMN held_before bigint,
    ADD CONSTRAINT held_event_has_a_tenant_and_a_cost
        CHECK (held_before IS NULL OR (tenant IS NOT NULL AND cost IS NOT NULL));

-- Applications' events by time, held events of a tenant in their order, and the others of a tenant by
-- time; those of all tenants by time tell when the next one is due.
DROP INDEX future_event_due;
CREATE INDEX future_event_due ON future_event (coalesce(retry_at, deliver_at), id)
    WHERE cost IS NULL;
CREATE INDEX future_event_held ON future_event (tenant COLLATE "C", id)
    WHERE held_before IS NOT NULL;
CREATE INDEX future_event_paced
    ON future_event (tenant COLLATE "C", (coalesce(retry_at, deliver_at)), id)
    WHERE cost IS NOT NULL AND held_before IS NULL;
CREATE INDEX future_event_paced_due ON future_event (coalesce(retry_at, deliver_at))
    WHERE cost IS NOT NULL AND held_before IS NULL;

-- The schedules of tenants whose last run is held: moving it tells them its id.
CREATE INDEX schedule_held_run ON schedule (last_event_id)
    WHERE last_event_id IS NOT NULL AND last_outbox_id IS NULL;

-- A tenant of which events were held.  Only what holds an event locks the row, so ids and sums have
-- the order in which requests are held.  The events of a tenant are moved in that order: when the
-- newest one is gone, all are, which is found by one key.
CREATE TABLE tenant_share (
    tenant   text   COLLATE "C" PRIMARY KEY,
    last_id  bigint NOT NULL DEFAULT 0,  -- the newest held event
    first_id bigint NOT NULL DEFAULT 0,  -- no older event is held
    total    bigint NOT NULL DEFAULT 0   -- the sum of the costs of all events that were ever held
);

-- Locks a tenant's share, and returns its row.
CREATE FUNCTION lock_share(tenant text) RETURNS tenant_share
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    share tenant_share;
BEGIN
    -- forget_shares() may delete it again, but not each time.
    FOR attempt IN 1 .. 10 LOOP
        INSERT INTO tenant_share (tenant) VALUES (lock_share.tenant) ON CONFLICT DO NOTHING;
        SELECT * INTO share FROM tenant_share s WHERE s.tenant = lock_share.tenant FOR UPDATE;
        IF FOUND THEN
            RETURN share;
        END IF;
    END LOOP;
    PERFORM require_stored(false, 'tenant_share');
END $$;
REVOKE ALL ON FUNCTION lock_share FROM PUBLIC;

-- Locks a tenant's share, or aborts the message if another session has locked it: a relay does not
-- wait for a client.  With a time-out, because the row may be new, which SKIP LOCKED does not skip.
CREATE FUNCTION try_lock_share(tenant text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '20ms' AS $$
BEGIN
    PERFORM lock_share(tenant);
EXCEPTION WHEN lock_not_available THEN
    PERFORM abort_unless(false);
END $$;
REVOKE ALL ON FUNCTION try_lock_share FROM PUBLIC;

-- Deletes the shares of tenants of which nothing is held.  Each is locked before it is examined: one
-- that is being held is not visible to the statement that waits for its lock.
CREATE FUNCTION forget_shares() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    locked  text[];
    deleted bigint;
BEGIN
    locked := ARRAY(SELECT s.tenant FROM tenant_share s
                     WHERE NOT EXISTS (SELECT FROM future_event f WHERE f.id = s.last_id)
                     LIMIT 1000 FOR UPDATE SKIP LOCKED);
    DELETE FROM tenant_share s
     WHERE s.tenant = ANY (locked)
       AND NOT EXISTS (SELECT FROM future_event f WHERE f.tenant COLLATE "C" = s.tenant
                                                    AND f.held_before IS NOT NULL);
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END $$;
REVOKE ALL ON FUNCTION forget_shares FROM PUBLIC;

-- ---------------------------------------------------------------- publishing

-- Stores the events of publish_events() and publish_shared().
--   costs: NULL: they are an application's.  Otherwise an event with a deliver_at is always delayed.
--   held_from: NULL, or the sum of the tenant's costs before these events, which are held.
--   requested: one row per event.  MATERIALIZED, because a second evaluation would generate other
--     event ids.  In the order of idempotency keys, in which accepted claims them: otherwise two
--     callers with the same keys in different orders would deadlock.
--   accepted: the rows whose idempotency key was claimed.
CREATE FUNCTION store_events(
    types         text[],
    payloads      jsonb[],
    keys          text[],
    tenants       text[],
    onces         text[],
    expires_at    timestamptz[],
    headers       jsonb[],
    deliver_at    timestamptz[],
    once_for      interval[],
    digests       bytea[],
    bodies        bytea[],
    content_types text[],
    costs         integer[],
    held_from     bigint
) RETURNS uuid[]
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    event_ids uuid[];
    unstored bigint;
    unstored_later bigint;
BEGIN
    -- unnest() would fill a shorter array with NULL.
    IF cardinality(types) <> ANY (ARRAY[
           cardinality(payloads), cardinality(keys), cardinality(tenants), cardinality(onces),
           cardinality(store_events.expires_at), cardinality(store_events.headers),
           cardinality(store_events.deliver_at), cardinality(store_events.once_for),
           cardinality(digests), cardinality(bodies), cardinality(content_types),
           cardinality(costs)]) THEN
        RAISE EXCEPTION 'arrays: each must have one element for each of types, or be NULL'
            USING ERRCODE = 'check_violation';
    END IF;
    IF EXISTS (SELECT FROM unnest(types) AS t WHERE starts_with(t, 'outbox.')) THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    IF store_events.headers IS NOT NULL THEN
        PERFORM require_own_headers(h) FROM unnest(store_events.headers) AS h WHERE h IS NOT NULL;
    END IF;
    WITH requested AS MATERIALIZED (
        SELECT e.*, gen_random_uuid() AS event_id,
               coalesce(e.deliver_at > clock_timestamp(), false)
               OR (e.cost IS NOT NULL AND e.deliver_at IS NOT NULL) AS is_delayed
          FROM unnest(types, payloads, keys, tenants, onces,
                      store_events.expires_at, store_events.headers, store_events.deliver_at,
                      store_events.once_for, store_events.digests, bodies, content_types, costs)
               WITH ORDINALITY AS e(type, payload, key, tenant, once, expires_at, headers,
                                    deliver_at, once_for, digest, body, content_type, cost, n)
         ORDER BY e.once COLLATE "C", e.n),
    accepted AS MATERIALIZED (
        SELECT r.*, NOT r.is_delayed AND held_from IS NOT NULL AS is_held FROM requested r
         WHERE r.once IS NULL OR claim_once(r.once, r.event_id, r.once_for, r.digest)),
    published AS (
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at,
                            body, content_type)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at,
               a.body, a.content_type
          FROM accepted a WHERE NOT a.is_delayed AND NOT a.is_held ORDER BY a.n
        RETURNING 1),
    delayed AS (
        -- A held event is due at once, also one that expires before it is stored.
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  body, content_type, cost, deliver_at, held_before)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at,
               a.body, a.content_type, a.cost,
               CASE WHEN a.is_delayed THEN a.deliver_at
                    ELSE least(clock_timestamp(), a.expires_at - interval '1 ms') END,
               CASE WHEN a.is_held THEN
                   held_from - a.cost
                   + sum(a.cost) FILTER (WHERE a.is_held) OVER (ORDER BY a.n) END
          FROM accepted a WHERE a.is_delayed OR a.is_held ORDER BY a.n
        RETURNING 1)
    SELECT array_agg(a.event_id ORDER BY r.n),
           count(*) FILTER (WHERE NOT a.is_delayed AND NOT a.is_held)
               - (SELECT count(*) FROM published),
           count(*) FILTER (WHERE a.is_delayed OR a.is_held) - (SELECT count(*) FROM delayed)
      INTO event_ids, unstored, unstored_later
      FROM requested r LEFT JOIN accepted a ON a.n = r.n;
    IF unstored <> 0 OR unstored_later <> 0 THEN
        PERFORM require_stored(false, CASE WHEN unstored <> 0 THEN 'outbox'::regclass
                                           ELSE 'future_event' END);
    END IF;
    RETURN event_ids;
END $$;
REVOKE ALL ON FUNCTION store_events FROM PUBLIC;

-- As in 0016_values.sql.
CREATE OR REPLACE FUNCTION publish_events(
    types         text[],
    payloads      jsonb[]       DEFAULT NULL,
    keys          text[]        DEFAULT NULL,
    tenants       text[]        DEFAULT NULL,
    onces         text[]        DEFAULT NULL,
    expires_at    timestamptz[] DEFAULT NULL,
    headers       jsonb[]       DEFAULT NULL,
    deliver_at    timestamptz[] DEFAULT NULL,
    once_for      interval[]    DEFAULT NULL,
    digests       bytea[]       DEFAULT NULL,
    bodies        bytea[]       DEFAULT NULL,
    content_types text[]        DEFAULT NULL
) RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
BEGIN
    RETURN store_events(types, payloads, keys, tenants, onces, expires_at, headers, deliver_at,
                        once_for, digests, bodies, content_types, NULL, NULL);
END $$;

-- Publishes what a tenant's token sends, for the API.  The events are held if the caller says that
-- they exceed the tenant's share, or while another event of the tenant is held; those with a
-- deliver_at are always delayed, and hold nothing back.
--
--   passes: whether the caller's share allows it.
--   costs: the deliveries of each event.
--   held_max: how much may be held of a tenant.  Above it nothing is published, and `over` is by how
--     much; a request finds room at least when nothing is held.
--   held: whether events were held.
--   version: the current routing version.
--   costs_version: that of the costs; NULL: any.  Under another one nothing is published, and
--     event_ids is NULL: otherwise a tenant that enables a hundred endpoints at once would publish a
--     request at no cost.
--
-- A direct request takes no lock: if it sees no held event, the message that moved the last one was
-- committed, and the ids of its events are lower.
CREATE FUNCTION publish_shared(
    tenant        text,
    passes        boolean,
    costs         integer[],
    held_max      bigint,
    types         text[],
    payloads      jsonb[]       DEFAULT NULL,
    keys          text[]        DEFAULT NULL,
    onces         text[]        DEFAULT NULL,
    expires_at    timestamptz[] DEFAULT NULL,
    headers       jsonb[]       DEFAULT NULL,
    deliver_at    timestamptz[] DEFAULT NULL,
    once_for      interval[]    DEFAULT NULL,
    digests       bytea[]       DEFAULT NULL,
    bodies        bytea[]       DEFAULT NULL,
    content_types text[]        DEFAULT NULL,
    costs_version bigint        DEFAULT NULL,
    OUT event_ids uuid[],
    OUT held      boolean,
    OUT version   bigint,
    OUT over      bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off
SET enable_seqscan = off AS $$  -- A session keeps a plan while the table grows.
#variable_conflict use_variable
DECLARE
    share     tenant_share;
    oldest    future_event;
    held_from bigint;
    added     bigint;
BEGIN
    SELECT c.version INTO version FROM cursor c;
    IF version <> costs_version THEN
        RETURN;
    END IF;
    held := (NOT passes
             OR EXISTS (SELECT FROM tenant_share s JOIN future_event f ON f.id = s.last_id
                         WHERE s.tenant = publish_shared.tenant))
        AND (deliver_at IS NULL OR array_position(deliver_at, NULL) IS NOT NULL);
    IF held THEN
        share := lock_share(tenant);
        -- Compared as a row, so that the entry of its index is read, whatever the statistics say of
        -- a table in which another tenant has most of the rows.
        SELECT * INTO oldest FROM future_event f
         WHERE f.held_before IS NOT NULL
           AND (f.tenant COLLATE "C", f.id) >= (share.tenant, share.first_id)
         ORDER BY f.tenant COLLATE "C", f.id LIMIT 1;
        IF oldest.tenant <> share.tenant THEN
            oldest := NULL;
        END IF;
        held_from := share.total;
        SELECT sum(t.cost) INTO added FROM unnest(costs, deliver_at) AS t(cost, at)
         WHERE t.at IS NULL;
        over := held_from - coalesce(oldest.held_before, held_from) + added - held_max;
        IF over > 0 AND oldest.id IS NOT NULL THEN
            RETURN;
        END IF;
        over := NULL;
    END IF;
    event_ids := store_events(
        types, payloads, keys, array_fill(tenant, ARRAY[cardinality(types)]), onces, expires_at,
        headers, deliver_at, once_for, digests, bodies, content_types, costs, held_from);
    IF held THEN
        SELECT max(f.id), coalesce(oldest.id, min(f.id)), max(f.held_before + f.cost)
          INTO share.last_id, share.first_id, share.total
          FROM future_event f WHERE f.event_id = ANY (event_ids) AND f.held_before IS NOT NULL;
        IF share.last_id IS NOT NULL THEN  -- Not every idempotency key was used.
            UPDATE tenant_share s
               SET last_id = share.last_id, first_id = share.first_id, total = share.total
             WHERE s.tenant = share.tenant;
            PERFORM require_stored(FOUND, 'tenant_share');
        END IF;
        IF pg_notification_queue_usage() <= 0.5 THEN
            PERFORM pg_notify(current_schema(), 'held');
        END IF;
    END IF;
END $$;
REVOKE ALL ON FUNCTION publish_shared FROM PUBLIC;

-- ------------------------------------------------------------------ erasure

-- The last erasure of a tenant: it has erased all events up to `data ->> 'through_id'`.
CREATE INDEX journal_erased ON journal ((data ->> 'tenant'), id) WHERE kind = 'erased';

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

-- ---------------------------------------------------------------- privileges

-- What is added to the functions in 0021_api.sql.
CREATE FUNCTION added_privileges(purpose text) RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT kind, name, privilege, of_columns, NULL::text[]
      FROM (VALUES
        ('{relay,operator,reader,api}'::text[], 'table', 'tenant_share', 'SELECT', NULL::text[]),
        ('{relay,operator,reader,api}', 'table', 'quota', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'idempotency_key_count', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'table', 'removed_lanes', 'SELECT', NULL),
        ('{relay,operator,reader,api}', 'function', 'added_privileges', 'EXECUTE', NULL),
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
REVOKE ALL ON FUNCTION added_privileges FROM PUBLIC;

-- As in 0021_api.sql, with what was added.
CREATE OR REPLACE FUNCTION required_privileges(purpose text)
RETURNS TABLE (kind text, name text, privilege text, columns text[])
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY EXECUTE format('
        SELECT n.kind, n.name, n.privilege, coalesce(n.of_columns, (
                   SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
                    WHERE n.all_but IS NOT NULL AND a.attrelid = to_regclass(n.name)
                      AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (n.all_but)))
          FROM (SELECT * FROM %I() UNION ALL SELECT * FROM added_privileges(%L)) n',
        purpose || '_privileges', purpose);
END $$;
