-- Programs of version 6 go on working.
--
-- Who may do what: four purposes that a role can be granted, each with what it needs
-- and nothing else.  A role may have several of them.
--
--   producer   publishes; it cannot read events, choose ids, or see anything of ours
--   relay      runs `outbox relay`; it owns nothing, changes no endpoint's settings, and
--              answers what the API's tokens of the scope `read` and receivers ask
--   operator   changes endpoints, dead letters, schedules, tokens and the like; with it a
--              relay's API does so, too
--   reader     looks at all of that; it sees no secret, no hash of a token, and of an
--              endpoint's headers only the names
--
-- Nobody but the owner defines anything in this schema or rewrites the journal, and a period
-- is begun and dropped by functions that look whether it may be.  Partitions need no rights
-- of their own: they are reached through their parents.
--
-- Whom a purpose was granted is written in the rights themselves: he may execute the
-- function that lists them.  So a migration can grant anew what has changed of them
-- (`settle_rights`), and a backup has it.

-- ---------------------------------------------------------- what they are

-- One right for each row.  `of_columns`: of these alone; `all_but`: of all but these.
CREATE TYPE needed AS (kind text, name text, privilege text, of_columns text[], all_but text[]);

CREATE FUNCTION producer_rights() RETURNS SETOF needed
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    VALUES
        ('table', 'outbox', 'INSERT',
         '{tenant,type,key,payload,headers,expires_at}'::text[], NULL::text[]),
        ('function', 'publish', 'EXECUTE', NULL, NULL),
        ('function', 'publish_many', 'EXECUTE', NULL, NULL),
        ('function', 'claim_once', 'EXECUTE', NULL, NULL),
        ('function', 'reset_once', 'EXECUTE', NULL, NULL),
        ('function', 'payload_bytes_max', 'EXECUTE', NULL, NULL)
$$;

-- What everybody needs who looks at our tables.
CREATE FUNCTION looking_rights() RETURNS SETOF needed
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT 'table', t.name, 'SELECT', NULL::text[], NULL::text[]
      FROM unnest('{attempt,batch,cursor,dead_letter,delivery,endpoint_health,future_event,gap,
                    journal,lane,lane_block,lane_counter,lane_progress,migration,once,outbox,
                    ownership,period,replay,replay_job,replay_part,replica,schedule,
                    subscription}'::text[]) AS t(name)
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], '{headers,identity}'::text[]),
        ('table', 'endpoint_secret', 'SELECT', NULL, '{secret}'),
        ('table', 'token', 'SELECT', NULL, '{hash}'),
        ('table', 'fetch_token', 'SELECT', NULL, '{hash}'),
        ('sequence', 'outbox_id_seq', 'SELECT', NULL, NULL),
        ('sequence', 'wakeup', 'SELECT', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{header_names,holds_ordinary,lane_name,looking_rights,meets,
                    names_operational,payload_bytes_max,rfc3339,rights,secrets_kept,
                    server_timeline}'::text[]) AS f(name)
$$;

-- A function of its own: who may execute it is a reader, and the others are none.
CREATE FUNCTION reader_rights() RETURNS SETOF needed
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$ SELECT * FROM looking_rights() $$;

CREATE FUNCTION operator_rights() RETURNS SETOF needed
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM looking_rights()
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], NULL::text[]),
        ('table', 'endpoint', 'INSERT', NULL, NULL),
        ('table', 'endpoint', 'UPDATE', NULL, NULL),
        ('table', 'endpoint_secret', 'SELECT', NULL, NULL),
        ('table', 'endpoint_secret', 'INSERT', NULL, NULL),
        ('table', 'endpoint_secret', 'UPDATE', NULL, NULL),
        ('table', 'endpoint_secret', 'DELETE', NULL, NULL),
        ('table', 'subscription', 'INSERT', NULL, NULL),
        ('table', 'subscription', 'UPDATE', NULL, NULL),
        ('table', 'subscription', 'DELETE', NULL, NULL),
        ('table', 'lane', 'INSERT', NULL, NULL),
        ('table', 'lane_counter', 'INSERT', NULL, NULL),
        ('table', 'lane_progress', 'INSERT', NULL, NULL),
        ('table', 'lane_progress', 'UPDATE', '{last_answer}', NULL),
        ('table', 'lane_block', 'DELETE', NULL, NULL),
        ('table', 'endpoint_health', 'INSERT', NULL, NULL),
        ('table', 'endpoint_health', 'UPDATE', '{last_answer}', NULL),
        ('table', 'ownership', 'INSERT', NULL, NULL),
        -- To lock its rows: whoever changes an endpoint keeps it from changing hands.
        ('table', 'ownership', 'UPDATE', '{epoch}', NULL),
        ('table', 'cursor', 'UPDATE', '{version,erasures}', NULL),
        ('table', 'dead_letter', 'UPDATE', '{state,payload,headers,last_answer}', NULL),
        ('table', 'replay_job', 'INSERT', NULL, NULL),
        ('table', 'replay_job', 'UPDATE', NULL, NULL),
        ('table', 'replay_part', 'INSERT', NULL, NULL),
        ('table', 'replay_part', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'INSERT', NULL, NULL),
        ('table', 'replay', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'DELETE', NULL, NULL),
        ('table', 'schedule', 'INSERT', NULL, NULL),
        ('table', 'schedule', 'UPDATE', NULL, NULL),
        ('table', 'schedule', 'DELETE', NULL, NULL),
        ('table', 'once', 'UPDATE', '{expires_at,resets}', NULL),
        ('table', 'future_event', 'DELETE', NULL, NULL),
        -- Erased, and never written anew; ids are the sequence's to give.
        ('table', 'outbox', 'UPDATE', '{payload,headers,erased_at}', NULL),
        ('table', 'outbox', 'INSERT', '{event_id,tenant,type,key,payload,headers}', NULL),
        ('table', 'attempt', 'UPDATE', '{answer}', NULL),
        -- Neither when it was nor who the session belongs to is the writer's to say.
        ('table', 'journal', 'INSERT', '{kind,actor,endpoint_id,data}', NULL),
        ('table', 'token', 'INSERT', NULL, NULL),
        ('table', 'token', 'UPDATE', '{revoked_at,revoked_by}', NULL),
        ('table', 'fetch_token', 'INSERT', NULL, NULL),
        ('table', 'fetch_token', 'UPDATE', '{expires_at}', NULL),
        ('table', 'fetch_token', 'DELETE', NULL, NULL),
        ('function', 'announce', 'EXECUTE', NULL, NULL),
        ('function', 'announce_all', 'EXECUTE', NULL, NULL),
        ('function', 'next_generation', 'EXECUTE', NULL, NULL)
$$;

CREATE FUNCTION relay_rights() RETURNS SETOF needed
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM looking_rights()
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], NULL::text[]),
        ('table', 'endpoint', 'UPDATE', '{state,state_at,state_by,state_why,generation}', NULL),
        ('table', 'endpoint_secret', 'SELECT', NULL, NULL),
        ('table', 'endpoint_secret', 'DELETE', NULL, NULL),
        ('table', 'subscription', 'UPDATE', '{to_batch}', NULL),
        ('table', 'lane', 'INSERT', NULL, NULL),
        ('table', 'lane_counter', 'INSERT', NULL, NULL),
        ('table', 'lane_counter', 'UPDATE', NULL, NULL),
        ('table', 'lane_progress', 'INSERT', NULL, NULL),
        ('table', 'lane_progress', 'UPDATE', NULL, NULL),
        ('table', 'lane_block', 'INSERT', NULL, NULL),
        ('table', 'lane_block', 'DELETE', NULL, NULL),
        ('table', 'endpoint_health', 'UPDATE', NULL, NULL),
        ('table', 'ownership', 'UPDATE', NULL, NULL),
        ('table', 'replica', 'INSERT', NULL, NULL),
        ('table', 'replica', 'UPDATE', NULL, NULL),
        ('table', 'replica', 'DELETE', NULL, NULL),
        ('table', 'cursor', 'UPDATE', NULL, NULL),
        ('table', 'gap', 'INSERT', NULL, NULL),
        ('table', 'gap', 'DELETE', NULL, NULL),
        -- The log: what is written there stays, but for what an erasure takes out of it.
        ('table', 'batch', 'INSERT', NULL, NULL),
        ('table', 'delivery', 'INSERT', NULL, NULL),
        ('table', 'attempt', 'INSERT', NULL, NULL),
        ('table', 'attempt', 'UPDATE', '{answer}', NULL),
        ('table', 'journal', 'INSERT', '{kind,actor,endpoint_id,data}', NULL),
        ('table', 'dead_letter', 'INSERT', NULL, NULL),
        ('table', 'dead_letter', 'UPDATE', NULL, NULL),
        ('table', 'dead_letter', 'DELETE', NULL, NULL),
        ('table', 'replay_job', 'INSERT', NULL, NULL),
        ('table', 'replay_job', 'UPDATE', NULL, NULL),
        ('table', 'replay_job', 'DELETE', NULL, NULL),
        ('table', 'replay_part', 'INSERT', NULL, NULL),
        ('table', 'replay_part', 'UPDATE', NULL, NULL),
        ('table', 'replay_part', 'DELETE', NULL, NULL),
        ('table', 'replay', 'INSERT', NULL, NULL),
        ('table', 'replay', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'DELETE', NULL, NULL),
        -- What enters by the clock, and what the relay tells of itself.
        ('table', 'outbox', 'INSERT',
         '{event_id,tenant,type,key,payload,headers,expires_at}', NULL),
        ('table', 'future_event', 'DELETE', NULL, NULL),
        ('table', 'schedule', 'UPDATE',
         '{next_at,look_at,last_at,last_run_at,last_outbox_id,last_event_id}', NULL),
        -- To lock once keys, of which old ones are deleted.
        ('table', 'once', 'UPDATE', '{expires_at}', NULL),
        ('table', 'once', 'DELETE', NULL, NULL),
        -- Who asks: tokens are looked up by their hash, and none is made or ended.
        ('table', 'token', 'SELECT', NULL, NULL),
        ('table', 'token', 'UPDATE', '{last_used_at}', NULL),
        ('table', 'fetch_token', 'SELECT', NULL, NULL),
        ('table', 'fetch_token', 'UPDATE', '{last_used_at}', NULL),
        ('sequence', 'wakeup', 'UPDATE', NULL, NULL),
        ('sequence', 'replica_id_seq', 'USAGE', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{add_partition,analyze_parent,announce,announce_all,count_on,drop_period,
                    empty_partition,end_period,next_generation,settle_period,summarize}'::text[])
        AS f(name)
$$;

-- The same with its columns, NULL where it is of all of them, for whatever a later
-- migration has added.
CREATE FUNCTION rights(purpose text)
RETURNS TABLE (kind text, name text, privilege text, columns text[])
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY EXECUTE format('
        SELECT n.kind, n.name, n.privilege, coalesce(n.of_columns, (
                   SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
                    WHERE n.all_but IS NOT NULL AND a.attrelid = to_regclass(n.name)
                      AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (n.all_but)))
          FROM %I() n', purpose || '_rights');
END $$;

-- ---------------------------------------------------------- granting them

-- Who was granted what, but for the owner, who may do everything.
CREATE FUNCTION purposes() RETURNS TABLE (purpose text, role regrole)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT w.purpose, acl.grantee::regrole
      FROM unnest('{producer,relay,operator,reader}'::text[]) AS w(purpose)
      JOIN pg_proc p ON p.pronamespace = quote_ident(current_schema())::regnamespace
       AND p.proname = w.purpose || '_rights'
     CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
     WHERE acl.grantee NOT IN (0, p.proowner)
$$;

-- What a role has here, but for what it owns; as the objects of GRANT and REVOKE.
CREATE FUNCTION granted_to(role regrole) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('SCHEMA %I', n.nspname) FROM pg_namespace n, aclexplode(n.nspacl) AS acl
     WHERE n.nspname = current_schema() AND acl.grantee = role AND n.nspowner <> role
    UNION
    SELECT format('%s %s', CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass)
      FROM pg_class c
     WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relowner <> role
       AND (EXISTS (SELECT FROM aclexplode(c.relacl) AS acl WHERE acl.grantee = role)
            OR EXISTS (SELECT FROM pg_attribute a, aclexplode(a.attacl) AS acl
                        WHERE a.attrelid = c.oid AND acl.grantee = role))
    UNION
    SELECT format('ROUTINE %s', p.oid::regprocedure) FROM pg_proc p, aclexplode(p.proacl) AS acl
     WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
       AND acl.grantee = role AND p.proowner <> role
$$;

-- Gives a role what these purposes need, and takes away whatever else it has here: what
-- an earlier version needed, or another purpose.  It is one transaction, so whoever works
-- with that role meanwhile misses nothing.
CREATE FUNCTION set_purposes(role regrole, wanted text[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    purpose text;
    needed record;
    object text;
BEGIN
    FOR object IN SELECT granted_to(role) LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', object, role);
    END LOOP;
    FOREACH purpose IN ARRAY wanted LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %s', current_schema(), role);
        FOR needed IN
            SELECT r.kind, r.privilege, r.columns,
                   CASE r.kind WHEN 'function' THEN (
                            SELECT p.oid::regprocedure::text FROM pg_proc p
                             WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                               AND p.proname = r.name)
                        ELSE quote_ident(r.name) END AS object
              FROM rights(purpose) r
            UNION ALL
            SELECT 'function', 'EXECUTE', NULL, format('%I()', purpose || '_rights')
        LOOP
            EXECUTE format('GRANT %s %s ON %s %s TO %s', needed.privilege,
                           '(' || (SELECT string_agg(quote_ident(c), ', ')
                                     FROM unnest(needed.columns) AS c) || ')',
                           needed.kind, needed.object, role);
        END LOOP;
    END LOOP;
END $$;

-- One more purpose, beside those that it has.
CREATE FUNCTION grant_purpose(purpose text, role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT set_purposes(role, ARRAY(
        SELECT p.purpose FROM purposes() p WHERE p.role = grant_purpose.role
         UNION SELECT grant_purpose.purpose))
$$;

CREATE FUNCTION grant_producer(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT grant_purpose('producer', role) $$;

CREATE FUNCTION grant_relay(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT grant_purpose('relay', role) $$;

CREATE FUNCTION grant_operator(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT grant_purpose('operator', role) $$;

CREATE FUNCTION grant_reader(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT grant_purpose('reader', role) $$;

-- Takes all of them away.
CREATE FUNCTION revoke_purposes(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT set_purposes(role, '{}') $$;

-- Brings everybody's rights up to date; each migration ends with it.  PostgreSQL lets
-- everybody execute a new function, and of ours nobody should because of that.
CREATE FUNCTION settle_rights() RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', current_schema());
    PERFORM set_purposes(p.role, array_agg(p.purpose)) FROM purposes() p GROUP BY p.role;
END $$;

-- ------------------------------------------------- what only an owner can do

-- These run with the owner's rights, so they do one thing each, to our own tables alone.

-- The names of an endpoint's headers: their values may be credentials.
CREATE FUNCTION header_names(endpoint_id uuid) RETURNS text[]
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT ARRAY(SELECT jsonb_object_keys(headers) ORDER BY 1) FROM endpoint WHERE id = endpoint_id
$$;

-- How many secrets are encrypted with which key; NULL: they are in clear.
CREATE FUNCTION secrets_kept() RETURNS TABLE (key text, count bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT s.key_id, count(*)
      FROM (SELECT key_id FROM endpoint_secret
            UNION ALL
            SELECT CASE WHEN identity LIKE 'sealed:%' THEN split_part(identity, ':', 2) END
              FROM endpoint WHERE identity IS NOT NULL
            UNION ALL
            SELECT split_part(h.value ->> 'sealed', ':', 2)
              FROM endpoint e CROSS JOIN LATERAL jsonb_each(e.headers) h) AS s
     GROUP BY 1 ORDER BY 1 NULLS FIRST
$$;

-- Ends the period that is written, and begins the next one; whether it was that one.  The
-- next one has its partitions, or producers would fail; and its ids are moved on to, never
-- back, which a rollback does not undo.  Like the two below it holds the cursor row: see
-- outbox/store/retention.py.
CREATE FUNCTION end_period(kind text, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    parents regclass[] := CASE end_period.kind WHEN 'events' THEN '{outbox}'::regclass[]
                               ELSE '{batch,delivery,attempt}'::regclass[] END;
    next_one bigint := end_period.number + 1;
    begins_at bigint := next_one * 100000000000;
    ids regclass := pg_get_serial_sequence('outbox', 'id');
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    IF EXISTS (SELECT FROM unnest(parents) AS of(parent)
                WHERE NOT EXISTS (
                      SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                       WHERE i.inhparent = of.parent AND NOT i.inhdetachpending
                         AND c.relname = (SELECT relname FROM pg_class WHERE oid = of.parent)
                                         || '_' || next_one)) THEN
        RETURN false;
    END IF;
    UPDATE period p SET ended_at = clock_timestamp()
     WHERE p.kind = end_period.kind AND p.number = end_period.number AND p.ended_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO period (kind, number, high)
    SELECT end_period.kind, next_one, b.high FROM batch b ORDER BY b.batch DESC LIMIT 1;
    IF end_period.kind = 'log' THEN
        -- A batch that holds nothing.
        INSERT INTO batch (batch, high, young)
        SELECT begins_at, b.high, b.young FROM batch b ORDER BY b.batch DESC LIMIT 1;
    ELSIF coalesce(pg_sequence_last_value(ids), 0) < begins_at - 1 THEN
        PERFORM setval(ids, begins_at - 1);
    END IF;
    RETURN true;
END $$;

-- Says which batch was the newest when all events of a period that ended were sequenced,
-- or were known never to come; whether that is so.
CREATE FUNCTION settle_period(number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    first_id bigint := settle_period.number * 100000000000;
    end_id bigint := first_id + 100000000000;
    ids regclass := pg_get_serial_sequence('outbox', 'id');
    quiet boolean;
    settled bigint;
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    -- All of its ids were given out before this is looked up: whether none of the
    -- transactions that may have got one is open.  Then what they wrote is looked for.
    quiet := NOT EXISTS (
        SELECT FROM pg_locks
         WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = ids
           AND pid IS DISTINCT FROM pg_backend_pid()
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database()));
    SELECT b.batch INTO settled
      FROM (SELECT batch, high, young FROM batch ORDER BY batch DESC LIMIT 1) b
     WHERE pg_sequence_last_value(ids) >= end_id - 1
       AND NOT EXISTS (SELECT FROM gap WHERE lo < end_id AND hi >= first_id)
       AND NOT b.young && int8range(first_id, end_id)
       AND (b.high >= end_id - 1
            OR quiet AND NOT EXISTS (SELECT FROM outbox WHERE id > b.high AND id < end_id));
    UPDATE period p SET last_batch = settled
     WHERE p.kind = 'events' AND p.number = settle_period.number AND settled IS NOT NULL
       AND p.ended_at IS NOT NULL AND p.last_batch IS NULL;
    RETURN FOUND;
END $$;

-- Decides, now and for good, that a period is dropped: only ever the oldest, when it ended,
-- all of it was sequenced, and no lane owes anything of it.  Nothing goes at once: what does
-- not own the partitions can empty them an hour later (empty_partition).
CREATE FUNCTION drop_period(kind text, number bigint)
RETURNS TABLE (began_at timestamptz, ended_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    last_one bigint;
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    SELECT CASE p.kind WHEN 'events' THEN p.last_batch
                ELSE (p.number + 1) * 100000000000 - 1 END INTO last_one
      FROM period p
     WHERE p.kind = drop_period.kind AND p.number = drop_period.number
       AND p.ended_at IS NOT NULL AND p.dropped_at IS NULL
       AND NOT EXISTS (SELECT FROM period older
                        WHERE older.kind = p.kind AND older.number < p.number
                          AND older.dropped_at IS NULL);
    IF last_one IS NULL OR EXISTS (
           SELECT FROM lane_progress l JOIN lane_counter c ON c.lane_id = l.lane_id
            WHERE c.last_seq > l.acked_seq AND l.floor_batch <= last_one) THEN
        RETURN;
    END IF;
    RETURN QUERY
        UPDATE period p SET dropped_at = clock_timestamp()
         WHERE p.kind = drop_period.kind AND p.number = drop_period.number
        RETURNING p.began_at, p.ended_at;
END $$;

-- Makes the partition of a period that is written, or soon will be.
CREATE FUNCTION add_partition(parent regclass, number bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    of_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) OR number IS NULL
       OR number NOT BETWEEN 0 AND (
           SELECT max(p.number) + 10 FROM period p WHERE p.kind = of_kind) THEN
        RAISE EXCEPTION 'there is to be no partition % of %', number, parent
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM make_partition(parent, number);
END $$;

-- Gives back the space of a partition whose period was dropped; whether there was any.
-- To detach and drop it takes its owner, and cannot be done in a function without making
-- producers wait.  This locks the partition alone, and waits for nobody for long: what is
-- still held is tried again.  An hour is for whoever looks at it in an older snapshot,
-- such as an audit, for which it would be empty.
CREATE FUNCTION empty_partition(parent regclass, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
DECLARE
    of_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
    child regclass := to_regclass(quote_ident(
        (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number));
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) OR child IS NULL
       OR NOT EXISTS (SELECT FROM period p
                       WHERE p.kind = of_kind AND p.number = empty_partition.number
                         AND p.dropped_at < clock_timestamp() - interval '1 hour') THEN
        RAISE EXCEPTION 'partition % of % is not of a period that was dropped an hour ago',
            number, parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_relation_size(child) = 0 THEN
        RETURN false;
    END IF;
    EXECUTE format('TRUNCATE ONLY %s', child);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- Tells the planner about a parent, which autovacuum leaves out.
CREATE FUNCTION analyze_parent(parent regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) THEN
        RAISE EXCEPTION '% is not a parent of ours', parent
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('ANALYZE %s', parent);
END $$;

-- Brings the index of a partition of events up to date, unless somebody vacuums or
-- analyses that partition just now: PostgreSQL would break off an autovacuum.
CREATE FUNCTION summarize(index regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_inherits
                    WHERE inhrelid = index AND inhparent = 'outbox_lookup'::regclass) THEN
        RAISE EXCEPTION '% is not of a partition of ours', index
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM brin_summarize_new_values(index);
EXCEPTION WHEN lock_not_available THEN
    NULL;
END $$;
