-- Compatible with programs of version 6.
--
-- Privileges: four purposes that a role can be granted, each with exactly the privileges that
-- it requires.  A role may have several purposes.
--
--   producer   publishes events; it cannot read events, choose ids or read other tables
--   relay      runs `outbox relay`; it owns nothing, changes no endpoint's settings, and
--              serves API requests of scope `read` and requests of receivers
--   operator   changes endpoints, dead letters, schedules, tokens and the like; a relay
--              with this purpose serves API requests that change them
--   reader     reads all of that except secrets, token hashes and header values
--
-- Only the owner can define objects in this schema or rewrite the journal.  Periods are begun
-- and dropped by functions that check whether it is allowed.  Partitions need no privileges
-- of their own, because they are accessed through their parents.
--
-- A purpose is recorded as EXECUTE privilege on the function that lists its privileges.  So a
-- migration can grant what it adds (`sync_grants`), and pg_dump preserves it.

-- ----------------------------------------------------- required privileges

-- One privilege per row.  of_columns: on these columns only; all_but: on all other columns.
CREATE TYPE required_privilege AS (
    kind text, name text, privilege text, of_columns text[], all_but text[]
);

CREATE FUNCTION producer_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    VALUES
        ('table', 'outbox', 'INSERT',
         '{tenant,type,key,payload,headers,expires_at}'::text[], NULL::text[]),
        ('function', 'publish', 'EXECUTE', NULL, NULL),
        ('function', 'publish_text', 'EXECUTE', NULL, NULL),
        ('function', 'publish_many', 'EXECUTE', NULL, NULL),
        ('function', 'claim_once', 'EXECUTE', NULL, NULL),
        ('function', 'reset_once', 'EXECUTE', NULL, NULL),
        ('function', 'payload_bytes_max', 'EXECUTE', NULL, NULL)
$$;

-- Privileges to read the tables, common to relay, operator and reader.
CREATE FUNCTION read_only_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT 'table', t.name, 'SELECT', NULL::text[], NULL::text[]
      FROM unnest('{attempt,batch,cursor,dead_letter,delivery,endpoint_health,future_event,gap,
                    idempotency_key,journal,lag_report,lane,lane_block,lane_counter,lane_progress,
                    lock,migration,outbox,ownership,period,replay,replay_job,replay_job_endpoint,
                    replica,schedule,subscription}'::text[]) AS t(name)
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], '{headers,identity}'::text[]),
        ('table', 'endpoint_secret', 'SELECT', NULL, '{secret}'),
        ('table', 'token', 'SELECT', NULL, '{hash}'),
        ('table', 'fetch_token', 'SELECT', NULL, '{hash}'),
        ('sequence', 'outbox_id_seq', 'SELECT', NULL, NULL),
        ('sequence', 'wakeup', 'SELECT', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{contains_ordinary_event,count_secrets_by_key,header_names,lane_name,
                    history_changed,matches_filter,payload_bytes_max,read_only_privileges,
                    required_privileges,rfc3339,selects_operational_events,server_identity,
                    server_timeline}'::text[]) AS f(name)
$$;

-- A separate function, because EXECUTE on it marks a role as a reader.
CREATE FUNCTION reader_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$ SELECT * FROM read_only_privileges() $$;

CREATE FUNCTION operator_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM read_only_privileges()
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
        ('table', 'lane', 'UPDATE', '{skip_seq}', NULL),
        ('table', 'lane_counter', 'INSERT', NULL, NULL),
        ('table', 'lane_progress', 'INSERT', NULL, NULL),
        ('table', 'lane_progress', 'UPDATE', '{last_response}', NULL),
        ('table', 'lane_block', 'DELETE', NULL, NULL),
        ('table', 'endpoint_health', 'INSERT', NULL, NULL),
        ('table', 'endpoint_health', 'UPDATE', '{last_response}', NULL),
        ('table', 'ownership', 'INSERT', NULL, NULL),
        -- For row locks: a change of an endpoint blocks a change of its ownership.
        ('table', 'ownership', 'UPDATE', '{epoch}', NULL),
        ('table', 'cursor', 'UPDATE', '{version,erasures,timeline,identity}', NULL),
        ('table', 'dead_letter', 'UPDATE', '{state,payload,headers,last_response,erased_at}', NULL),
        ('table', 'replay_job', 'INSERT', NULL, NULL),
        ('table', 'replay_job', 'UPDATE', NULL, NULL),
        ('table', 'replay_job_endpoint', 'INSERT', NULL, NULL),
        ('table', 'replay_job_endpoint', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'INSERT', NULL, NULL),
        ('table', 'replay', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'DELETE', NULL, NULL),
        ('table', 'schedule', 'INSERT', NULL, NULL),
        ('table', 'schedule', 'UPDATE', NULL, NULL),
        ('table', 'schedule', 'DELETE', NULL, NULL),
        ('table', 'idempotency_key', 'UPDATE', '{expires_at,resets}', NULL),
        ('table', 'future_event', 'DELETE', NULL, NULL),
        -- Events can be erased, not rewritten; only the sequence assigns ids.
        ('table', 'outbox', 'UPDATE', '{payload,headers,erased_at}', NULL),
        ('table', 'outbox', 'INSERT', '{event_id,tenant,type,key,payload,headers}', NULL),
        ('table', 'attempt', 'UPDATE', '{response}', NULL),
        -- The writer cannot set the time or the session's role.
        ('table', 'journal', 'INSERT', '{kind,actor,endpoint_id,data,request}', NULL),
        ('table', 'token', 'INSERT', NULL, NULL),
        ('table', 'token', 'UPDATE', '{revoked_at,revoked_by}', NULL),
        ('table', 'fetch_token', 'INSERT', NULL, NULL),
        ('table', 'fetch_token', 'UPDATE', '{expires_at}', NULL),
        ('table', 'fetch_token', 'DELETE', NULL, NULL),
        ('sequence', 'replay_job_id_seq', 'SELECT', NULL, NULL),
        ('function', 'publish_operational_event', 'EXECUTE', NULL, NULL),
        ('function', 'publish_operational_events', 'EXECUTE', NULL, NULL),
        ('function', 'abort_unless', 'EXECUTE', NULL, NULL),
        ('function', 'first_generation', 'EXECUTE', NULL, NULL),
        ('function', 'next_generation', 'EXECUTE', NULL, NULL)
$$;

CREATE FUNCTION relay_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM read_only_privileges()
    UNION ALL VALUES
        ('table', 'endpoint', 'SELECT', NULL::text[], NULL::text[]),
        ('table', 'endpoint', 'UPDATE', '{state,state_at,state_by,state_comment,generation}', NULL),
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
        ('table', 'lock', 'UPDATE', '{holder,token,expires_at}', NULL),
        ('table', 'lag_report', 'UPDATE', NULL, NULL),
        ('table', 'gap', 'INSERT', NULL, NULL),
        ('table', 'gap', 'DELETE', NULL, NULL),
        -- The log is append-only, except for erasure.
        ('table', 'batch', 'INSERT', NULL, NULL),
        ('table', 'delivery', 'INSERT', NULL, NULL),
        ('table', 'attempt', 'INSERT', NULL, NULL),
        ('table', 'attempt', 'UPDATE', '{response}', NULL),
        ('table', 'journal', 'INSERT', '{kind,actor,endpoint_id,data}', NULL),
        ('table', 'dead_letter', 'INSERT', NULL, NULL),
        ('table', 'dead_letter', 'UPDATE', NULL, NULL),
        ('table', 'dead_letter', 'DELETE', NULL, NULL),
        ('table', 'replay_job', 'UPDATE', NULL, NULL),
        ('table', 'replay_job_endpoint', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'INSERT', NULL, NULL),
        ('table', 'replay', 'UPDATE', NULL, NULL),
        ('table', 'replay', 'DELETE', NULL, NULL),
        -- Schedules, delayed events and operational events.
        ('table', 'outbox', 'INSERT',
         '{event_id,tenant,type,key,payload,headers,expires_at}', NULL),
        ('table', 'future_event', 'DELETE', NULL, NULL),
        ('table', 'schedule', 'UPDATE',
         '{next_at,due_at,last_at,last_run_at,last_outbox_id,last_event_id}', NULL),
        -- For row locks: expired idempotency keys are deleted.
        ('table', 'idempotency_key', 'UPDATE', '{expires_at}', NULL),
        ('table', 'idempotency_key', 'DELETE', NULL, NULL),
        -- Authentication: tokens are looked up by hash; none is created or revoked.
        ('table', 'token', 'SELECT', NULL, NULL),
        ('table', 'token', 'UPDATE', '{last_used_at}', NULL),
        ('table', 'fetch_token', 'SELECT', NULL, NULL),
        ('table', 'fetch_token', 'UPDATE', '{last_used_at}', NULL),
        ('sequence', 'wakeup', 'UPDATE', NULL, NULL),
        ('function', 'abort_unless', 'EXECUTE', NULL, NULL),
        ('sequence', 'replica_id_seq', 'USAGE', NULL, NULL)
    UNION ALL
    SELECT 'function', f.name, 'EXECUTE', NULL, NULL
      FROM unnest('{add_partition,advance_lane_counter,analyze_parent,drop_period,empty_partition,
                    end_period,first_generation,next_generation,publish_operational_event,
                    publish_operational_events,settle_period,summarize}'::text[])
        AS f(name)
$$;

-- Returns the privileges of a purpose with their columns (NULL: the whole object).  all_but is
-- resolved here, so that it includes columns added by later migrations.
CREATE FUNCTION required_privileges(purpose text)
RETURNS TABLE (kind text, name text, privilege text, columns text[])
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY EXECUTE format('
        SELECT n.kind, n.name, n.privilege, coalesce(n.of_columns, (
                   SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
                    WHERE n.all_but IS NOT NULL AND a.attrelid = to_regclass(n.name)
                      AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (n.all_but)))
          FROM %I() n', purpose || '_privileges');
END $$;

-- ------------------------------------------------------- granting purposes

-- Returns the purposes granted to each role, except to the owner.
CREATE FUNCTION role_purposes() RETURNS TABLE (purpose text, role regrole)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT w.purpose, acl.grantee::regrole
      FROM unnest('{producer,relay,operator,reader}'::text[]) AS w(purpose)
      JOIN pg_proc p ON p.pronamespace = quote_ident(current_schema())::regnamespace
       AND p.proname = w.purpose || '_privileges'
     CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
     WHERE acl.grantee NOT IN (0, p.proowner)
$$;

-- Returns the privileges of some roles on the objects of this schema that they do not own;
-- `object` is in the syntax of GRANT.  is_ours: the owner granted it, without GRANT OPTION.
CREATE FUNCTION held_privileges(roles regrole[])
RETURNS TABLE (role regrole, object text, privilege text, column_name text, is_ours boolean)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH relation AS (
        SELECT c.oid, c.relowner, c.relacl,
               format('%s %s', CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END,
                      c.oid::regclass) AS object
          FROM pg_class c
         WHERE c.relnamespace = quote_ident(current_schema())::regnamespace),
    held AS (
        SELECT format('SCHEMA %I', n.nspname) AS object, NULL::text AS column_name,
               n.nspowner AS owner, acl.*
          FROM pg_namespace n, aclexplode(n.nspacl) AS acl WHERE n.nspname = current_schema()
        UNION ALL
        SELECT r.object, NULL, r.relowner, acl.* FROM relation r, aclexplode(r.relacl) AS acl
        UNION ALL
        SELECT r.object, a.attname::text, r.relowner, acl.*
          FROM relation r JOIN pg_attribute a ON a.attrelid = r.oid, aclexplode(a.attacl) AS acl
        UNION ALL
        SELECT format('ROUTINE %s', p.oid::regprocedure), NULL, p.proowner, acl.*
          FROM pg_proc p, aclexplode(p.proacl) AS acl
         WHERE p.pronamespace = quote_ident(current_schema())::regnamespace)
    SELECT h.grantee::regrole, h.object, h.privilege_type, h.column_name,
           h.grantor = h.owner AND NOT h.is_grantable
      FROM held h WHERE h.grantee = ANY (roles) AND h.owner <> h.grantee
$$;

-- Returns the privileges of a purpose, in the form of held_privileges.
CREATE FUNCTION purpose_privileges(purpose text)
RETURNS TABLE (object text, privilege text, column_name text)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE r.kind
           WHEN 'function' THEN 'ROUTINE ' || (
                SELECT p.oid::regprocedure FROM pg_proc p
                 WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                   AND p.proname = r.name)
           ELSE upper(r.kind) || ' ' || quote_ident(r.name)::regclass END,
           r.privilege, c.name
      FROM (SELECT * FROM required_privileges(purpose)
            UNION ALL
            VALUES ('function', purpose || '_privileges', 'EXECUTE', NULL::text[])) AS r
      LEFT JOIN LATERAL unnest(r.columns) AS c(name) ON true
    UNION ALL
    SELECT format('SCHEMA %I', current_schema()), 'USAGE', NULL
$$;

-- Sets the privileges of some roles to those of their purposes (role of_roles[n] has purposes[n]),
-- and revokes everything else in this schema.  It runs in one transaction, so a session of such a
-- role is never without privileges.
--
-- It executes only what changes a privilege, and plans for all roles at once: a migration may have
-- locked the outbox, and producers wait until this has ended.
--   excess: objects on which a role has other privileges; all of them are granted again.
CREATE FUNCTION set_privileges(roles regrole[], of_roles regrole[], purposes text[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    statement text;
BEGIN
    FOREACH statement IN ARRAY (
        WITH held AS MATERIALIZED (SELECT * FROM held_privileges(roles)),
        of_purpose AS MATERIALIZED (
            SELECT given.purpose, p.*
              FROM (SELECT DISTINCT unnest(purposes)) AS given(purpose),
                   purpose_privileges(given.purpose) AS p),
        required AS MATERIALIZED (
            SELECT DISTINCT given.role, p.object, p.privilege, p.column_name
              FROM unnest(of_roles, purposes) AS given(role, purpose)
              JOIN of_purpose p USING (purpose)),
        excess AS MATERIALIZED (
            SELECT role, object FROM held WHERE NOT is_ours
            UNION
            SELECT role, object FROM (SELECT role, object, privilege, column_name FROM held
                                      EXCEPT SELECT * FROM required) AS other),
        missing AS (
            SELECT * FROM required WHERE (role, object) IN (SELECT * FROM excess)
            UNION
            (SELECT * FROM required EXCEPT SELECT role, object, privilege, column_name FROM held)),
        statement AS (
            SELECT 1 AS step, format('REVOKE ALL ON %s FROM %s CASCADE', object, role) AS text
              FROM excess
            UNION ALL
            SELECT 2, format('GRANT %s %s ON %s TO %s', privilege,
                             '(' || string_agg(quote_ident(column_name), ', ') || ')', object, role)
              FROM missing GROUP BY role, object, privilege, column_name IS NULL)
        SELECT coalesce(array_agg(s.text ORDER BY s.step), '{}') FROM statement s)
    LOOP
        EXECUTE statement;
    END LOOP;
END $$;

-- Sets the purposes of a role.
CREATE FUNCTION set_purposes(role regrole, purposes text[]) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT set_privileges(ARRAY[role], array_fill(role, ARRAY[cardinality(purposes)]), purposes)
$$;

-- Adds a purpose to those of a role.
CREATE FUNCTION grant_purpose(purpose text, role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT set_purposes(role, ARRAY(
        SELECT p.purpose FROM role_purposes() p WHERE p.role = grant_purpose.role
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

-- Revokes all purposes of a role.
CREATE FUNCTION revoke_purposes(role regrole) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT set_purposes(role, '{}') $$;

-- Grants every role what its purposes require now; each migration ends with it.  It also
-- revokes EXECUTE from PUBLIC, which PostgreSQL grants on every new function.
CREATE FUNCTION sync_grants() RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    public_functions text := (
        SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc p
         WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
           AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS acl
                        WHERE acl.grantee = 0));
BEGIN
    IF public_functions IS NOT NULL THEN
        EXECUTE format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', public_functions);
    END IF;
    PERFORM set_privileges(array_agg(p.role), array_agg(p.role), array_agg(p.purpose))
       FROM role_purposes() p;
END $$;

-- ------------------------------------------------ SECURITY DEFINER functions

-- These run with the owner's privileges.  Each does one thing, to the tables of this schema.

-- Returns the names of an endpoint's headers; their values may be credentials.
CREATE FUNCTION header_names(endpoint_id uuid) RETURNS text[]
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT ARRAY(SELECT jsonb_object_keys(headers) ORDER BY 1) FROM endpoint WHERE id = endpoint_id
$$;

-- Returns the number of secrets per encryption key; NULL: stored in plain text.
CREATE FUNCTION count_secrets_by_key() RETURNS TABLE (key text, count bigint)
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

-- Ends the current period and begins the next one; returns false if it is not the current one.
-- The next period must have its partitions, or producers would fail.  setval() only advances
-- ids, because it is not transactional.  Like the two functions below it locks the cursor
-- row: see outbox/store/retention/periods.py.
CREATE FUNCTION end_period(kind text, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    parents regclass[] := CASE end_period.kind WHEN 'events' THEN '{outbox}'::regclass[]
                               ELSE '{batch,delivery,attempt}'::regclass[] END;
    next_number bigint := end_period.number + 1;
    begins_at bigint := next_number * 100000000000;
    ids regclass := pg_get_serial_sequence('outbox', 'id');
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    IF EXISTS (SELECT FROM unnest(parents) AS of(parent)
                WHERE NOT EXISTS (
                      SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                       WHERE i.inhparent = of.parent AND NOT i.inhdetachpending
                         AND c.relname = (SELECT relname FROM pg_class WHERE oid = of.parent)
                                         || '_' || next_number)) THEN
        RETURN false;
    END IF;
    UPDATE period p SET ended_at = clock_timestamp()
     WHERE p.kind = end_period.kind AND p.number = end_period.number AND p.ended_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO period (kind, number, high)
    SELECT end_period.kind, next_number, b.high FROM batch b ORDER BY b.batch DESC LIMIT 1;
    IF end_period.kind = 'log' THEN
        -- An empty batch, which advances the batch number.
        INSERT INTO batch (batch, high, young)
        SELECT begins_at, b.high, b.young FROM batch b ORDER BY b.batch DESC LIMIT 1;
    ELSIF coalesce(pg_sequence_last_value(ids), 0) < begins_at - 1 THEN
        PERFORM setval(ids, begins_at - 1);
    END IF;
    RETURN true;
END $$;

-- Records the last batch of an ended period, once all its events are sequenced or known never
-- to be committed; returns whether it did.
CREATE FUNCTION settle_period(number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    first_id bigint := settle_period.number * 100000000000;
    end_id bigint := first_id + 100000000000;
    ids regclass := pg_get_serial_sequence('outbox', 'id');
    no_writers boolean;
    settled bigint;
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    -- Order matters: all ids were allocated before this check that no transaction that may
    -- hold one is open.  Only then is the outbox searched for what those transactions wrote.
    no_writers := NOT EXISTS (
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
            OR no_writers AND NOT EXISTS (SELECT FROM outbox WHERE id > b.high AND id < end_id));
    UPDATE period p SET last_batch = settled
     WHERE p.kind = 'events' AND p.number = settle_period.number AND settled IS NOT NULL
       AND p.ended_at IS NOT NULL AND p.last_batch IS NULL;
    RETURN FOUND;
END $$;

-- Decides irrevocably to drop a period: the oldest one, after it ended, all of it was
-- sequenced, and no lane has pending deliveries in it.  The partitions are removed later:
-- roles other than the owner can empty them after an hour (empty_partition).
CREATE FUNCTION drop_period(kind text, number bigint)
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
    IF final_batch IS NULL OR EXISTS (
           SELECT FROM lane_progress l JOIN lane_counter c ON c.lane_id = l.lane_id
            WHERE c.last_seq > l.acked_seq AND l.floor_batch <= final_batch) THEN
        RETURN;
    END IF;
    RETURN QUERY
        UPDATE period p SET dropped_at = clock_timestamp()
         WHERE p.kind = drop_period.kind AND p.number = drop_period.number
        RETURNING p.began_at, p.ended_at;
END $$;

-- Creates a partition of the current or a coming period.
CREATE FUNCTION add_partition(parent regclass, number bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    period_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) OR number IS NULL
       OR number NOT BETWEEN 0 AND (
           SELECT max(p.number) + 10 FROM period p WHERE p.kind = period_kind) THEN
        RAISE EXCEPTION 'partition % of % may not be created', number, parent
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM make_partition(parent, number);
END $$;

-- Frees the space of a partition whose period was dropped; returns whether there was any.  To
-- detach and drop it requires its owner, and inside a function would block producers.  This
-- locks only the partition; lock_timeout bounds the wait, and the caller retries.  The delay
-- of an hour is for readers with an older snapshot, such as an audit: TRUNCATE is not
-- MVCC-safe, and the partition would appear empty to them.
CREATE FUNCTION empty_partition(parent regclass, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
DECLARE
    period_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
    child regclass := to_regclass(quote_ident(
        (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number));
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) OR child IS NULL
       OR NOT EXISTS (SELECT FROM period p
                       WHERE p.kind = period_kind AND p.number = empty_partition.number
                         AND p.dropped_at < clock_timestamp() - interval '1 hour') THEN
        RAISE EXCEPTION 'partition % of % does not belong to a period that was dropped at least an hour ago',
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

-- Analyzes a partitioned table, which autovacuum does not do.
CREATE FUNCTION analyze_parent(parent regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) THEN
        RAISE EXCEPTION '% is not a partitioned table of this schema', parent
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('ANALYZE %s', parent);
END $$;

-- Summarizes the BRIN index of an outbox partition.  lock_timeout: it gives up if the
-- partition is being vacuumed or analyzed, because waiting would cancel an autovacuum.
CREATE FUNCTION summarize(index regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_inherits
                    WHERE inhrelid = index AND inhparent = 'outbox_lookup'::regclass) THEN
        RAISE EXCEPTION '% is not an index of an outbox partition', index
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM brin_summarize_new_values(index);
EXCEPTION WHEN lock_not_available THEN
    NULL;
END $$;
