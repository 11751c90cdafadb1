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
    IF stored_id IS DISTINCT FROM new_id THEN
        PERFORM require_stored(false, CASE WHEN publish_event.deliver_at > clock_timestamp()
                                           THEN 'future_event'::regclass ELSE 'outbox' END);
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
           AND c.relkind = 'r' AND c.relname <> 'outbox' AND NOT c.relispartition
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
        SELECT 'function', f.name, 'EXECUTE', NULL::text[]
          FROM unnest('{insert_filters,missing_guards,require_stored,sequences_behind,
                        suppressed_insert}'::text[]) AS f(name)
         WHERE purpose IN ('reader', 'operator', 'relay');
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
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET row_security = off', definer);
    END LOOP;
END $$;

-- -------------------------------------------------------------------- the tables

-- Last, because producers wait for the locks; the outbox first, because they insert into it first.
LOCK TABLE outbox IN SHARE ROW EXCLUSIVE MODE;

-- A delayed event that could not be stored in the outbox waits until retry_at, behind those that
-- can.  deliver_at stays: it is what the publisher asked for.
ALTER TABLE future_event ADD COLUMN retry_at timestamptz, ADD COLUMN problem text;
DROP INDEX future_event_due;
CREATE INDEX future_event_due ON future_event (coalesce(retry_at, deliver_at), id);
CREATE INDEX future_event_problem ON future_event (id) WHERE problem IS NOT NULL;

-- The tables of a dropped period that maintenance has begun to detach.  A table of that name that
-- somebody else has detached may have events that were never read: it is not dropped.
ALTER TABLE period ADD COLUMN detaching oid[] NOT NULL DEFAULT '{}';

-- A new reason: 'missing', an event that is gone although nothing erased it.
ALTER TABLE dead_letter DROP CONSTRAINT dead_letter_reason_check;
ALTER TABLE dead_letter ADD CONSTRAINT dead_letter_reason_check
    CHECK (reason IN ('refused', 'exhausted', 'expired', 'erased', 'missing', 'skipped', 'backlog',
                      'adopted', 'disabled', 'removed'));

-- Dead letters of older versions whose reason 'erased' may be wrong; maintenance classifies them.
CREATE INDEX dead_letter_unclassified ON dead_letter (id)
 WHERE reason = 'erased' AND erased_at IS NULL AND outbox_id IS NOT NULL;

DO $$ BEGIN PERFORM guard_events(); END $$;
