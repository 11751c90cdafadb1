-- Relays stop first.
--
-- Absence is not evidence: a row that a read does not return may exist.  An older relay does not
-- know delayed events that are postponed, and would try them again and again.

-- ---------------------------------------------- events are not removed, nor left out

-- A deleted event cannot be told from one that was rolled back, so events are not deleted,
-- truncated or renumbered, unless a transaction sets "<schema>.remove" to on: retention, tests, and
-- an operator who repairs something.  (In the name, characters that a setting cannot have are
-- replaced by "_".)  An INSERT fires none of these triggers.

-- One function for all of them.  It does not refuse DETACH and DROP, which fire no trigger.
CREATE FUNCTION refuse_removal() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    setting text := regexp_replace(current_schema(), '^[0-9]|[^A-Za-z0-9_]', '_', 'g') || '.remove';
BEGIN
    IF coalesce(current_setting(setting, true), '') <> 'on' THEN
        RAISE EXCEPTION USING ERRCODE = 'restrict_violation',
            MESSAGE = format('events of %I.outbox may not be %s', current_schema(),
                CASE TG_OP WHEN 'DELETE' THEN 'deleted' WHEN 'TRUNCATE' THEN 'truncated'
                           ELSE 'renumbered' END),
            DETAIL = 'The relay would take them for events that were rolled back.',
            HINT = format('Retention removes them; outbox erase removes their content. In tests '
                          'and repairs: SET LOCAL %s = ''on''.', setting);
    END IF;
    RETURN OLD;
END $$;

-- Triggers that are missing or not enabled always, and the statements that repair them.
--   AFTER UPDATE, without a list of columns: another trigger may set NEW.id, also if no statement
--     names the column.
--   refuse_truncate: a trigger for each partition, because PostgreSQL does not clone statement
--     triggers.  pg_restore --disable-triggers leaves all of them in the state O.
CREATE FUNCTION missing_guards() RETURNS TABLE (relation text, name text, statement text)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH event_table AS MATERIALIZED (
        SELECT relid, level = 0 AS is_parent FROM pg_partition_tree('outbox')),
    guard AS (
        SELECT e.relid, t.name, t.action
          FROM event_table e
          JOIN (VALUES
               (false, 'refuse_truncate', 'BEFORE TRUNCATE ON %s FOR EACH STATEMENT'),
               (true, 'refuse_delete', 'BEFORE DELETE ON %s FOR EACH ROW'),
               (true, 'refuse_renumbering', 'AFTER UPDATE ON %s FOR EACH ROW '
                                            'WHEN (OLD.id IS DISTINCT FROM NEW.id)'))
               AS t(parent_only, name, action) ON e.is_parent OR NOT t.parent_only)
    SELECT g.relid::text, g.name,
           format('CREATE TRIGGER %s ' || g.action || ' EXECUTE FUNCTION %I.refuse_removal(); '
                  'ALTER TABLE %2$s ENABLE ALWAYS TRIGGER %1$s', g.name,
                  format('%I.%I', current_schema(), c.relname), current_schema())
      FROM guard g JOIN pg_class c ON c.oid = g.relid
     WHERE NOT EXISTS (SELECT FROM pg_trigger t
                        WHERE t.tgrelid = g.relid AND t.tgfoid = 'refuse_removal'::regproc
                          AND t.tgname = g.name)
    UNION ALL
    SELECT t.tgrelid::regclass::text, t.tgname::text,
           format('ALTER TABLE %I.%I ENABLE ALWAYS TRIGGER %I', current_schema(), c.relname,
                  t.tgname)
      FROM pg_trigger t JOIN event_table e ON e.relid = t.tgrelid
      JOIN pg_class c ON c.oid = t.tgrelid
     WHERE t.tgfoid IN ('refuse_removal'::regproc, 'notify_relay'::regproc) AND t.tgenabled <> 'A'
$$;

-- Repairs them.  Producers wait behind the lock of each, so the wait for it is short.
CREATE FUNCTION guard_events() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
DECLARE
    repair text;
BEGIN
    FOR repair IN SELECT statement FROM missing_guards() LOOP
        EXECUTE repair;
    END LOOP;
END $$;

-- The trigger exists before ATTACH, so no partition is without it.
CREATE OR REPLACE FUNCTION make_partition(
    parent regclass, number bigint, width bigint DEFAULT 100000000000
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    child text := (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', child, parent);
    IF parent = 'outbox'::regclass THEN
        EXECUTE format('CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON %I '
                       'FOR EACH STATEMENT EXECUTE FUNCTION refuse_removal()', child);
        EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_truncate', child);
    END IF;
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                   parent, child, number * width, (number + 1) * width);
END $$;

-- As in 0007_roles.sql; it is one of those that may remove events, and leaves alone a table that was
-- detached by hand.
CREATE OR REPLACE FUNCTION empty_partition(parent regclass, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
DECLARE
    period_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
    child regclass := to_regclass(quote_ident(
        (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number));
    setting text := regexp_replace(current_schema(), '^[0-9]|[^A-Za-z0-9_]', '_', 'g') || '.remove';
    before text := coalesce(current_setting(setting, true), '');
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) OR child IS NULL
       OR NOT EXISTS (SELECT FROM period p
                       WHERE p.kind = period_kind AND p.number = empty_partition.number
                         AND p.dropped_at < clock_timestamp() - interval '1 hour'
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

-- ------------------------------------------------------ a suppressed INSERT is an error

-- A BEFORE trigger that returns NULL, or a rule, leaves neither a row nor an error.

-- Triggers and rules that may suppress an INSERT; `discards`: nothing speaks against it.
CREATE FUNCTION insert_filters(relation regclass) RETURNS TABLE (name text, discards boolean)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('trigger %I on %s', t.tgname, t.tgrelid::regclass),
           l.lanname <> 'plpgsql' OR p.prosrc ~* '\mreturn\s+null\M'
      FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_language l ON l.oid = p.prolang
     WHERE t.tgrelid IN (SELECT relid FROM pg_partition_tree(relation) UNION SELECT relation)
       AND NOT t.tgisinternal AND t.tgparentid = 0 AND t.tgenabled <> 'D'
       AND t.tgtype & 7 = 7  -- BEFORE INSERT FOR EACH ROW
    UNION ALL
    SELECT format('rule %I on %s', r.rulename, r.ev_class::regclass), true
      FROM pg_rewrite r
     WHERE r.ev_class = relation AND r.ev_type = '3' AND r.is_instead AND r.ev_enabled <> 'D'
    ORDER BY 2 DESC, 1
$$;

-- Why rows were not stored.
CREATE FUNCTION suppressed_insert(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('an INSERT into %I.%s stored nothing', current_schema(), relation)
           || coalesce(': suppressed by ' || string_agg(name, ' or '), '')
      FROM insert_filters(relation)
$$;

-- Fails if not all rows were stored.  OB003: see outbox/drivers/errors.py.
CREATE FUNCTION require_stored(all_stored boolean, relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF all_stored IS NOT TRUE THEN
        RAISE EXCEPTION USING ERRCODE = 'OB003', MESSAGE = suppressed_insert(relation);
    END IF;
END $$;

-- Claims an idempotency key; returns true for exactly one caller.  The primary
-- key arbitrates: a second caller waits until the first transaction ends.  A
-- caller that claims without an event id then calls publish(claimed => true),
-- which lets the winner alone compute the payload.
--
-- DO NOTHING, not DO UPDATE: DO UPDATE would lock the row for each losing caller,
-- and the next caller would wait for that caller's transaction.
--
-- keep is the retention of the key; NULL means 30 days.
CREATE OR REPLACE FUNCTION claim_once(
    once_key text, for_event uuid DEFAULT NULL, keep interval DEFAULT NULL,
    digest bytea DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    keep := coalesce(keep, interval '30 days');
    IF keep <= interval '0' OR keep > interval '876600 hours' THEN
        RAISE EXCEPTION 'once: the retention of a key must be more than 0 and at most a century'
            USING ERRCODE = 'check_violation';
    END IF;
    -- A second round if an expired row is deleted between the INSERT and the UPDATE.  A row that
    -- is not stored then is suppressed.
    FOR round IN 1 .. 2 LOOP
        INSERT INTO idempotency_key (key, event_id, expires_at, request_digest)
        VALUES (once_key, for_event, clock_timestamp() + keep, digest)
        ON CONFLICT (key) DO NOTHING;
        IF FOUND THEN
            RETURN true;
        END IF;
        UPDATE idempotency_key SET event_id = for_event,
                        claimed_at = clock_timestamp(),
                        expires_at = clock_timestamp() + keep,
                        request_digest = digest
         WHERE key = once_key AND expires_at <= clock_timestamp();
        IF FOUND THEN
            RETURN true;
        END IF;
        IF EXISTS (SELECT FROM idempotency_key WHERE key = once_key) THEN
            RETURN false;
        END IF;
    END LOOP;
    PERFORM require_stored(false, 'idempotency_key');
END $$;

-- Publishes one event with a payload, or with a body and its content type; see publish().
CREATE OR REPLACE FUNCTION publish_event(
    type         text,
    payload      jsonb       DEFAULT NULL,
    key          text        DEFAULT NULL,
    tenant       text        DEFAULT NULL,
    once         text        DEFAULT NULL,
    expires_at   timestamptz DEFAULT NULL,
    headers      jsonb       DEFAULT NULL,
    deliver_at   timestamptz DEFAULT NULL,
    claimed      boolean     DEFAULT false,
    once_for     interval    DEFAULT NULL,
    body         bytea       DEFAULT NULL,
    content_type text        DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    new_id uuid := gen_random_uuid();
    stored_id uuid;
BEGIN
    IF starts_with(publish_event.type, 'outbox.') THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    IF publish_event.once_for IS NOT NULL
       AND (publish_event.once IS NULL OR publish_event.claimed) THEN
        RAISE EXCEPTION 'once_for: requires an idempotency key (once) that is not claimed yet'
            USING ERRCODE = 'check_violation';
    END IF;
    IF publish_event.claimed THEN
        UPDATE idempotency_key AS o SET event_id = new_id
         WHERE o.key = publish_event.once AND o.event_id IS NULL
           AND o.expires_at > clock_timestamp();
        IF NOT FOUND THEN
            RAISE EXCEPTION 'once: the key is not claimed, or its event is already published'
                USING ERRCODE = 'check_violation';
        END IF;
    ELSIF publish_event.once IS NOT NULL
          AND NOT claim_once(publish_event.once, new_id, publish_event.once_for) THEN
        RETURN NULL;
    END IF;
    -- RETURNING: PostgreSQL refuses such an INSERT if a rule replaces it by something else.
    IF publish_event.deliver_at > clock_timestamp() THEN
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  body, content_type, deliver_at)
        VALUES (new_id, publish_event.tenant, publish_event.type, publish_event.key,
                publish_event.payload, publish_event.headers, publish_event.expires_at,
                publish_event.body, publish_event.content_type, publish_event.deliver_at)
        RETURNING event_id INTO stored_id;
    ELSE
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at,
                            body, content_type)
        VALUES (new_id, publish_event.tenant, publish_event.type, publish_event.key,
                publish_event.payload, publish_event.headers, publish_event.expires_at,
                publish_event.body, publish_event.content_type)
        RETURNING event_id INTO stored_id;
    END IF;
    IF stored_id IS NULL THEN
        PERFORM require_stored(false, CASE WHEN publish_event.deliver_at > clock_timestamp()
                                           THEN 'future_event'::regclass ELSE 'outbox' END);
    END IF;
    IF stored_id <> new_id THEN
        RAISE EXCEPTION 'event_id: a trigger changed it, so the event could not be found'
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN new_id;
END $$;

-- Publishes many events, each with a payload or a body; see publish_many().
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    event_ids uuid[];
    unstored bigint;
    unstored_later bigint;
BEGIN
    -- unnest() would fill a shorter array with NULL.
    IF cardinality(types) <> ANY (ARRAY[
           cardinality(payloads), cardinality(keys), cardinality(tenants), cardinality(onces),
           cardinality(publish_events.expires_at), cardinality(publish_events.headers),
           cardinality(publish_events.deliver_at), cardinality(publish_events.once_for),
           cardinality(digests), cardinality(bodies), cardinality(content_types)]) THEN
        RAISE EXCEPTION 'arrays: each must have one element for each of types, or be NULL'
            USING ERRCODE = 'check_violation';
    END IF;
    IF EXISTS (SELECT FROM unnest(types) AS t WHERE starts_with(t, 'outbox.')) THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    -- requested: one row per event.  MATERIALIZED, because a second evaluation would
    -- generate other event ids.  In the order of idempotency keys, in which accepted claims
    -- them: otherwise two callers with the same keys in different orders would deadlock.
    -- accepted: the rows whose idempotency key was claimed.
    WITH requested AS MATERIALIZED (
        SELECT e.*, gen_random_uuid() AS event_id,
               coalesce(e.deliver_at > clock_timestamp(), false) AS is_delayed
          FROM unnest(types, payloads, keys, tenants, onces,
                      publish_events.expires_at, publish_events.headers, publish_events.deliver_at,
                      publish_events.once_for, publish_events.digests, bodies, content_types)
               WITH ORDINALITY AS e(type, payload, key, tenant, once, expires_at, headers,
                                    deliver_at, once_for, digest, body, content_type, n)
         ORDER BY e.once COLLATE "C", e.n),
    accepted AS MATERIALIZED (
        SELECT r.* FROM requested r
         WHERE r.once IS NULL OR claim_once(r.once, r.event_id, r.once_for, r.digest)),
    published AS (
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at,
                            body, content_type)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at,
               a.body, a.content_type
          FROM accepted a WHERE NOT a.is_delayed ORDER BY a.n
        RETURNING 1),
    delayed AS (
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  body, content_type, deliver_at)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at,
               a.body, a.content_type, a.deliver_at
          FROM accepted a WHERE a.is_delayed ORDER BY a.n
        RETURNING 1)
    SELECT array_agg(a.event_id ORDER BY r.n),
           count(*) FILTER (WHERE NOT a.is_delayed) - (SELECT count(*) FROM published),
           count(*) FILTER (WHERE a.is_delayed) - (SELECT count(*) FROM delayed)
      INTO event_ids, unstored, unstored_later
      FROM requested r LEFT JOIN accepted a ON a.n = r.n;
    IF unstored <> 0 OR unstored_later <> 0 THEN
        PERFORM require_stored(false, CASE WHEN unstored <> 0 THEN 'outbox'::regclass
                                           ELSE 'future_event' END);
    END IF;
    RETURN event_ids;
END $$;

-- As in 0005_operational.sql; a suppressed event is rejected like one that a constraint refuses.
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

-- ---------------------------------------------------------------- notifications

-- When the server's notification queue is full, a commit that notifies fails.  Above half of it,
-- which a session that listens and does not read can cause, producers do not notify: a relay polls.
-- Tested here, not in the trigger's WHEN clause, which each INSERT evaluates.
CREATE OR REPLACE FUNCTION notify_relay() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF coalesce(current_setting(
           regexp_replace(current_schema(), '^[0-9]|[^A-Za-z0-9_]', '_', 'g') || '.notify',
           true), '') <> 'off' AND pg_notification_queue_usage() <= 0.5 THEN
        PERFORM pg_notify(current_schema(), '');
    END IF;
    RETURN NULL;
END $$;

-- ---------------------------------------------------------------- sequences behind

-- Logical replication and a restore of data alone copy rows, and leave the sequences of their ids
-- where they were.  Returns those that are behind the highest id of their table.  Not that of the
-- outbox: its position decides which ids are taken for rolled back, so an operator sets it.
CREATE FUNCTION sequences_behind()
RETURNS TABLE (relation text, sequence text, last_value bigint, highest bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    id_column record;
BEGIN
    FOR id_column IN
        SELECT c.relname, a.attname,
               pg_get_serial_sequence(format('%I.%I', current_schema(), c.relname), a.attname) AS seq
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attidentity <> ''
         WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
           AND c.relname = ANY ('{adoption,dead_letter,fetch_token,future_event,journal,lane,
                                  replay,replay_job,replica,schedule,token}'::name[])
         ORDER BY c.relname
    LOOP
        EXECUTE format('SELECT max(%I) FROM %I', id_column.attname, id_column.relname)
           INTO highest;
        last_value := coalesce(pg_sequence_last_value(id_column.seq::regclass), 0);
        IF highest > last_value THEN
            relation := id_column.relname;
            sequence := id_column.seq;
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- Advances them; returns how many.  No insert got an id above the highest one meanwhile, because it
-- would have failed on those in between.
CREATE FUNCTION advance_sequences() RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT count(setval(sequence::regclass, highest)) FROM sequences_behind()
$$;

-- ------------------------------------------------------------------ accounting

-- A count of the events that does not depend on what the relay concluded.  In every block of ids up
-- to the cursor's position, the number of rows is the number of ids without the dead ones.  Ids of
-- open gaps are left out of both sides, because rows of them may be committed and not sequenced.
-- Block n of a period has 2^20 ids, from number × 10^11 + n × 2^20; a block ends with its period.
--
-- Dead ids are counted per block, because their batches are dropped before the events.
CREATE TABLE event_account (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    batch    bigint NOT NULL DEFAULT 0,  -- dead ids of all batches up to this one are counted
    first_id bigint NOT NULL DEFAULT 0   -- lowest accounted id
);

CREATE TABLE event_block (
    period    bigint NOT NULL,
    block     bigint NOT NULL,
    dead      bigint NOT NULL DEFAULT 0, -- counted dead ids, and what the owner accepts as gone
    present   bigint,                    -- the last count: rows, by the index,
    expected  bigint,                    -- and as many as there should be
    examined_at timestamptz,
    PRIMARY KEY (period, block)
);
CREATE INDEX event_block_difference ON event_block (examined_at) WHERE present <> expected;

-- Dead ranges of more than 2^30 ids, each in one period: the unused rest of a period, or what a
-- setval() skipped.  They are not counted in blocks.
CREATE TABLE event_void (
    ids int8range PRIMARY KEY
);

-- Dead ids of a log that was dropped before this migration are not known.
INSERT INTO event_account (first_id)
    SELECT CASE number WHEN 0 THEN 0 ELSE high + 1 END
      FROM period WHERE kind = 'log' AND dropped_at IS NULL ORDER BY number LIMIT 1;

CREATE FUNCTION block_ids(period bigint, block bigint) RETURNS int8range
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT int8range(period * 100000000000 + (block << 20),
                     least(period * 100000000000 + ((block + 1) << 20),
                           (period + 1) * 100000000000))
$$;

-- The parts of a range by block.
CREATE FUNCTION split_into_blocks(ids int8range)
RETURNS TABLE (period bigint, block bigint, part int8range)
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT n.period, b.block, ids * block_ids(n.period, b.block)
      FROM generate_series(lower(ids) / 100000000000,
                           (upper(ids) - 1) / 100000000000) AS n(period),
           LATERAL generate_series(
               greatest(lower(ids) - n.period * 100000000000, 0) >> 20,
               (least(upper(ids) - n.period * 100000000000, 100000000000) - 1) >> 20) AS b(block)
$$;

-- Ids in open gaps.  (This and the functions below read by indexes, also for `outbox verify`, which
-- turns that off for its own query.)
CREATE FUNCTION open_ids() RETURNS int8multirange
LANGUAGE sql STABLE
SET search_path FROM CURRENT SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    SELECT coalesce((SELECT young FROM batch ORDER BY batch DESC LIMIT 1), '{}')
           + coalesce((SELECT range_agg(int8range(lo, hi, '[]')) FROM gap), '{}')
$$;

-- Counts dead ids.
CREATE FUNCTION count_dead_ids(ids int8multirange) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    WITH dead AS MATERIALIZED (
        SELECT d.part * int8range(n.period * 100000000000, (n.period + 1) * 100000000000) AS part
          FROM event_account a,
               unnest(ids * int8multirange(int8range(a.first_id, NULL))) AS d(part),
               generate_series(lower(d.part) / 100000000000,
                               (upper(d.part) - 1) / 100000000000) AS n(period)
         WHERE NOT EXISTS (SELECT FROM period p
                            WHERE p.kind = 'events' AND p.number = n.period
                              AND p.dropped_at IS NOT NULL)),
    voids AS (
        INSERT INTO event_void (ids)
        SELECT part FROM dead WHERE upper(part) - lower(part) > 1 << 30)
    INSERT INTO event_block AS e (period, block, dead)
    SELECT s.period, s.block, sum(upper(s.part) - lower(s.part))
      FROM dead, split_into_blocks(dead.part) s
     WHERE upper(dead.part) - lower(dead.part) <= 1 << 30
     GROUP BY s.period, s.block
    ON CONFLICT (period, block) DO UPDATE SET dead = e.dead + excluded.dead
$$;

-- The opposite, for ids of which events exist (`outbox resequence`).
CREATE FUNCTION discount_dead_ids(ids int8multirange) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    WITH cut AS MATERIALIZED (
        SELECT v.ids FROM event_void v WHERE v.ids && discount_dead_ids.ids),
    removed AS (
        DELETE FROM event_void v USING cut WHERE v.ids = cut.ids),
    rest AS (
        INSERT INTO event_void (ids)
        SELECT r.part
          FROM cut, unnest(int8multirange(cut.ids) - discount_dead_ids.ids) AS r(part)),
    counted AS (
        SELECT s.period, s.block, sum(upper(s.part) - lower(s.part)) AS dead
          FROM event_account a,
               unnest(discount_dead_ids.ids * int8multirange(int8range(a.first_id, NULL))
                      - coalesce((SELECT range_agg(cut.ids) FROM cut), '{}')) AS d(part),
               split_into_blocks(d.part) s
         GROUP BY s.period, s.block)
    UPDATE event_block e SET dead = e.dead - counted.dead
      FROM counted WHERE e.period = counted.period AND e.block = counted.block
$$;

-- Counts the dead ids of the next batches that have some, in the order of batches, which is that of
-- their commits; returns whether there may be more.
CREATE FUNCTION account_batches(batches_max integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    counted bigint := (SELECT a.batch FROM event_account a FOR UPDATE);
    reached bigint;
    dead_ids int8multirange;
    is_full boolean;
BEGIN
    WITH due AS MATERIALIZED (
        SELECT b.batch, b.dead FROM batch b
         WHERE b.batch > counted AND NOT isempty(b.dead) ORDER BY b.batch LIMIT batches_max)
    SELECT CASE count(*) WHEN batches_max THEN max(due.batch)
                ELSE (SELECT max(b.batch) FROM batch b) END,
           (SELECT range_agg(d.part) FROM due, unnest(due.dead) AS d(part)),
           count(*) = batches_max
      INTO reached, dead_ids, is_full FROM due;
    IF dead_ids IS NOT NULL THEN
        PERFORM count_dead_ids(dead_ids);
    END IF;
    UPDATE event_account a SET batch = reached WHERE a.batch < reached;
    RETURN is_full;
END $$;

-- Ids up to the cursor's position, of periods that are not dropped.
CREATE FUNCTION accounted_ids() RETURNS int8range
LANGUAGE sql STABLE
SET search_path FROM CURRENT SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    SELECT int8range(bounds.lo, greatest(bounds.lo, bounds.high + 1))
      FROM (SELECT greatest(a.first_id, (SELECT min(number) * 100000000000 FROM period
                                          WHERE kind = 'events' AND dropped_at IS NULL)) AS lo,
                   (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) AS high
              FROM event_account a) bounds
$$;

-- The number of events that should exist per block, as far as it has some of these ids.
CREATE FUNCTION expected_events(of_ids int8range)
RETURNS TABLE (period bigint, block bigint, expected bigint)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    WITH usable AS MATERIALIZED (
        SELECT int8multirange(of_ids * accounted_ids() * int8range(1, NULL)) - open_ids()
               - coalesce((SELECT range_agg(v.ids) FROM event_void v), '{}')
               - coalesce((SELECT range_agg(d.part)
                             FROM event_account a, batch b, unnest(b.dead) AS d(part)
                            WHERE b.batch > a.batch AND NOT isempty(b.dead)), '{}') AS ids),
    assigned AS (
        SELECT s.period, s.block, sum(upper(s.part) - lower(s.part))::bigint AS ids
          FROM usable, unnest(usable.ids) AS u(part), split_into_blocks(u.part) s
         GROUP BY s.period, s.block)
    SELECT period, block, coalesce(a.ids, 0) - coalesce(e.dead, 0)
      FROM assigned a
      FULL JOIN (SELECT e.period, e.block, e.dead FROM event_block e
                  WHERE block_ids(e.period, e.block) && of_ids) e USING (period, block)
$$;

-- Expected events of a block, and those that are there by the index, by which the relay reads, too.
-- No row: its period was dropped, or it has no id yet.  STABLE: all of it is one snapshot.  Without
-- JIT, which the cost of disabled scans would trigger.
CREATE FUNCTION account(of_period bigint, of_block bigint)
RETURNS TABLE (expected bigint, present bigint)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    SELECT coalesce(e.expected, 0), p.present
      FROM (SELECT block_ids(of_period, of_block) * accounted_ids() AS ids OFFSET 0) b
     CROSS JOIN LATERAL (
           SELECT count(o.id) AS present
             FROM unnest(int8multirange(b.ids) - open_ids()) AS searched(part)
            CROSS JOIN LATERAL (
                  SELECT id FROM outbox
                   WHERE id >= lower(searched.part) AND id < upper(searched.part) OFFSET 0) o) p
      LEFT JOIN expected_events(b.ids) e ON true
     WHERE NOT isempty(b.ids)
$$;

-- Counts a block, and journals a difference that is not recorded yet.  A difference
-- counts if a second count, with a later snapshot, repeats it.
CREATE FUNCTION examine_block(of_period bigint, of_block bigint, actor text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    counted record;
    difference bigint;
    recorded bigint;
BEGIN
    SELECT a.expected, a.present INTO counted FROM account(of_period, of_block) a;
    difference := counted.present - counted.expected;
    IF difference <> 0 THEN
        SELECT a.expected, a.present INTO counted FROM account(of_period, of_block) a;
    END IF;
    -- Excludes that the block is dropped meanwhile.
    PERFORM FROM event_account FOR UPDATE;
    IF counted.present - counted.expected IS DISTINCT FROM difference OR difference IS NULL
       OR isempty(block_ids(of_period, of_block) * accounted_ids()) THEN
        RETURN;
    END IF;
    recorded := (SELECT e.present - e.expected FROM event_block e
                  WHERE e.period = of_period AND e.block = of_block);
    INSERT INTO event_block AS e (period, block, present, expected, examined_at)
    VALUES (of_period, of_block, counted.present, counted.expected, clock_timestamp())
    ON CONFLICT (period, block) DO UPDATE
       SET present = excluded.present, expected = excluded.expected,
           examined_at = excluded.examined_at;
    IF difference <> 0 AND recorded IS DISTINCT FROM difference THEN
        INSERT INTO journal (kind, actor, data)
        SELECT 'events_unaccounted', examine_block.actor,
               jsonb_build_object('first_id', lower(b.ids), 'last_id', upper(b.ids) - 1,
                                  'events', counted.present, 'expected', counted.expected)
          FROM block_ids(of_period, of_block) AS b(ids);
    END IF;
END $$;

-- The blocks to examine next: the last one, then those never examined, then the longest ago.
-- A block of nothing but dead ids only if it has an event.
CREATE FUNCTION blocks_to_examine(blocks_max integer) RETURNS TABLE (period bigint, block bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    WITH assigned AS MATERIALIZED (
        SELECT x.period, x.block FROM expected_events('(,)') x
        UNION
        SELECT o.id / 100000000000, (o.id % 100000000000) >> 20
          FROM event_void v
         CROSS JOIN LATERAL (SELECT id FROM outbox WHERE id >= lower(v.ids) AND id < upper(v.ids)
                              ORDER BY id LIMIT 1) o)
    SELECT a.period, a.block FROM assigned a LEFT JOIN event_block e USING (period, block)
     ORDER BY (a.period, a.block) = (SELECT m.period, m.block FROM assigned m
                                      ORDER BY m.period DESC, m.block DESC LIMIT 1) DESC,
              e.examined_at NULLS FIRST, a.period, a.block
     LIMIT blocks_max
$$;

-- For exporters, without the relay's role and code: the oldest committed event that is not
-- sequenced, which is above the cursor's position or in an open gap, or has an id that the sequence
-- does not assign.  One row always; age 0: there is none.  A function, because a view would read
-- less under row level security.
CREATE FUNCTION unsequenced_events()
RETURNS TABLE (age_s double precision, created_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT coalesce(greatest(extract(epoch FROM clock_timestamp() - min(o.created_at)), 0), 0)
               ::double precision,
           min(o.created_at)
      FROM unnest(open_ids() + int8multirange(
               int8range(NULL, 1),
               int8range(coalesce((SELECT high FROM batch ORDER BY batch DESC LIMIT 1), 0) + 1,
                         NULL))) AS unsequenced(part)
     CROSS JOIN LATERAL (
           SELECT created_at FROM outbox
            WHERE id >= coalesce(lower(unsequenced.part), 0)
              AND id < coalesce(upper(unsequenced.part), 9223372036854775807)
            ORDER BY id LIMIT 1) o
$$;

-- As in 0007_roles.sql, with the accounts: the dead ids of a log are counted before it is dropped,
-- and blocks are dropped with their events.
CREATE OR REPLACE FUNCTION drop_period(kind text, number bigint)
RETURNS TABLE (began_at timestamptz, ended_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    final_batch bigint;
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    SELECT CASE p.kind WHEN 'events' THEN p.last_batch
                ELSE (p.number + 1) * 100000000000 - 1 END INTO final_batch
      FROM period p
     WHERE p.kind = drop_period.kind AND p.number = drop_period.number
       AND p.ended_at IS NOT NULL AND p.dropped_at IS NULL
       AND NOT EXISTS (SELECT FROM period older
                        WHERE older.kind = p.kind AND older.number < p.number
                          AND older.dropped_at IS NULL);
    IF final_batch IS NULL
       OR drop_period.kind = 'log'
          AND final_batch >= coalesce((SELECT a.batch FROM event_account a), 0)
       OR EXISTS (
           SELECT FROM lane_progress l JOIN lane_counter c ON c.lane_id = l.lane_id
            WHERE c.last_seq > l.acked_seq AND l.floor_batch <= final_batch) THEN
        RETURN;
    END IF;
    RETURN QUERY
        UPDATE period p SET dropped_at = clock_timestamp()
         WHERE p.kind = drop_period.kind AND p.number = drop_period.number
        RETURNING p.began_at, p.ended_at;
    IF drop_period.kind = 'events' THEN
        PERFORM FROM event_account FOR UPDATE;
        DELETE FROM event_block e WHERE e.period = drop_period.number;
        DELETE FROM event_void v WHERE lower(v.ids) / 100000000000 = drop_period.number;
    END IF;
END $$;

-- -------------------------------------------------------------------- privileges

-- As in 0012_adoption.sql, with the privileges that were added since.
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
    RETURN QUERY
        SELECT added.kind, added.name, added.privilege, added.columns
          FROM (VALUES ('producer', 'table', 'outbox', 'INSERT', '{body,content_type}'::text[]),
                       ('producer', 'function', 'publish_event', 'EXECUTE', NULL),
                       ('producer', 'function', 'publish_events', 'EXECUTE', NULL),
                       ('relay', 'table', 'outbox', 'INSERT', '{body,content_type}'),
                       ('operator', 'table', 'outbox', 'UPDATE', '{body,content_type}'),
                       ('operator', 'table', 'dead_letter', 'UPDATE', '{body,content_type}'),
                       ('reader', 'table', 'lane_receipt', 'SELECT', NULL),
                       ('operator', 'table', 'lane_receipt', 'SELECT', NULL),
                       ('operator', 'table', 'lane', 'UPDATE', '{repair,repair_seq}'),
                       ('relay', 'table', 'lane', 'UPDATE', '{repair,repair_seq}'),
                       ('relay', 'table', 'lane_receipt', 'SELECT', NULL),
                       ('relay', 'table', 'lane_receipt', 'INSERT', NULL),
                       ('relay', 'table', 'lane_receipt', 'UPDATE', NULL),
                       ('reader', 'table', 'delivery_history', 'SELECT', NULL),
                       ('operator', 'table', 'delivery_history', 'SELECT', NULL),
                       ('relay', 'table', 'delivery_history', 'SELECT', NULL),
                       ('relay', 'table', 'delivery_history', 'INSERT', NULL),
                       ('relay', 'table', 'delivery_history', 'UPDATE', NULL),
                       ('relay', 'table', 'delivery_history', 'DELETE', NULL),
                       ('reader', 'table', 'adoption', 'SELECT', NULL),
                       ('reader', 'table', 'adopted_row', 'SELECT', NULL),
                       ('operator', 'table', 'adoption', 'SELECT', NULL),
                       ('operator', 'table', 'adopted_row', 'SELECT', NULL),
                       ('relay', 'table', 'future_event', 'UPDATE', '{retry_at,problem}'),
                       ('relay', 'function', 'guard_events', 'EXECUTE', NULL),
                       ('relay', 'function', 'advance_sequences', 'EXECUTE', NULL))
               AS added(purpose, kind, name, privilege, columns)
         WHERE added.purpose = required_privileges.purpose;
    RETURN QUERY
        SELECT a.kind, a.name, a.privilege, NULL::text[]
          FROM (VALUES ('table', 'event_account', 'SELECT'),
                       ('table', 'event_block', 'SELECT'),
                       ('table', 'event_void', 'SELECT'),
                       ('function', 'account', 'EXECUTE'),
                       ('function', 'accounted_ids', 'EXECUTE'),
                       ('function', 'block_ids', 'EXECUTE'),
                       ('function', 'expected_events', 'EXECUTE'),
                       ('function', 'open_ids', 'EXECUTE'),
                       ('function', 'unsequenced_events', 'EXECUTE'),
                       ('function', 'insert_filters', 'EXECUTE'),
                       ('function', 'missing_guards', 'EXECUTE'),
                       ('function', 'require_stored', 'EXECUTE'),
                       ('function', 'sequences_behind', 'EXECUTE'),
                       ('function', 'suppressed_insert', 'EXECUTE'))
               AS a(kind, name, privilege)
         WHERE purpose IN ('reader', 'operator', 'relay');
    RETURN QUERY
        SELECT 'function', f.name, 'EXECUTE', NULL::text[]
          FROM unnest('{account_batches,blocks_to_examine,examine_block}'::text[]) AS f(name)
         WHERE purpose = 'relay';
END $$;

-- ------------------------------------------------------------------ hidden rows

-- Functions with the owner's privileges read all rows, or fail: a policy with FORCE ROW LEVEL
-- SECURITY applies to the owner, too, and an absent row would be taken for one that was never
-- written.  Last, because CREATE OR REPLACE FUNCTION removes a setting that it does not repeat.
DO $$
DECLARE
    definer regprocedure;
BEGIN
    FOR definer IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.prosecdef
           AND p.proname = ANY ('{account,account_batches,add_partition,advance_sequences,analyze_parent,
             blocks_to_examine,claim_once,count_secrets_by_key,drop_period,
             empty_partition,end_period,examine_block,expected_events,guard_events,
             header_names,notify_relay,publish,publish_event,publish_events,
             publish_many,publish_text,reset_once,sequences_behind,server_identity,
             settle_period,summarize,unsequenced_events}'::name[])
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET row_security = off', definer);
    END LOOP;
END $$;

-- -------------------------------------------------------------------- the tables

-- The tables of a dropped period that maintenance has begun to detach.  A table of that name that
-- somebody else has detached may have events that were never read: it is not dropped.
ALTER TABLE period ADD COLUMN detaching oid[] NOT NULL DEFAULT '{}';

-- A new reason: 'missing', an event that is gone although nothing erased it.  Checking all rows takes
-- long, so this comes before the lock for which producers wait.
ALTER TABLE dead_letter DROP CONSTRAINT dead_letter_reason_check;
ALTER TABLE dead_letter ADD CONSTRAINT dead_letter_reason_check
    CHECK (reason IN ('refused', 'exhausted', 'expired', 'erased', 'missing', 'skipped', 'backlog',
                      'adopted', 'disabled', 'removed'));

-- Dead letters of older versions whose reason 'erased' may be wrong; maintenance classifies them.
CREATE INDEX dead_letter_unclassified ON dead_letter (id)
 WHERE reason = 'erased' AND erased_at IS NULL AND outbox_id IS NOT NULL;

-- Last, because producers wait for the locks; the outbox first, because they insert into it first.
LOCK TABLE outbox IN SHARE ROW EXCLUSIVE MODE;

-- A delayed event that could not be stored in the outbox waits until retry_at, behind those that
-- can.  deliver_at stays: it is what the publisher asked for.
ALTER TABLE future_event ADD COLUMN retry_at timestamptz, ADD COLUMN problem text;
DROP INDEX future_event_due;
CREATE INDEX future_event_due ON future_event (coalesce(retry_at, deliver_at), id);
CREATE INDEX future_event_problem ON future_event (id) WHERE problem IS NOT NULL;

DO $$ BEGIN PERFORM guard_events(); END $$;
