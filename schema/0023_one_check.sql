-- Compatible with programs of version 22.
--
-- One constraint of the outbox instead of ten.  PostgreSQL parses the stored expression of each
-- constraint again for every statement, which cost about half of a producer's INSERT.  A plpgsql
-- function is parsed once in a session, whose first INSERT costs up to a millisecond more.  A
-- constraint, not a trigger: it checks the row after all triggers, also in the replica role and while
-- triggers are disabled.

-- Refuses an event, with the error of a constraint: its SQLSTATE, message, schema, table and
-- constraint.  Constraint names are part of the error that a producer receives, and that of the first
-- violated one in alphabetical order is reported, as PostgreSQL does.  Without a DETAIL, which would
-- copy the row to the server's log.
--
-- It runs as the role that inserts, in any session: with any search_path (an empty one in a restore),
-- with types and functions of the same names in it, and without USAGE of this schema.  So each name
-- in it is of pg_catalog and says so, also that of an operator (BETWEEN and IN take theirs from the
-- search_path), and no literal has a backslash, which standard_conforming_strings = off would remove.
-- SET search_path would cost each row of COPY up to a fifth.
--
-- It has few expressions, and rare columns have their own, because each is prepared once in a
-- transaction; the constraints of those come first in the order of names.  A condition that is NULL is
-- not violated.  The result is NULL, with which a constraint is satisfied: RETURN true would be one
-- more expression.
CREATE FUNCTION require_valid_event(
    relation     oid,
    event_id     uuid,
    tenant       text,
    type         text,
    key          text,
    payload      jsonb,
    headers      jsonb,
    expires_at   timestamptz,
    erased_at    timestamptz,
    body         bytea,
    content_type text,
    bytes_max    integer,
    OUT result   boolean
) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $check$
#variable_conflict use_variable
DECLARE
    violated    pg_catalog.text;
    schema_name pg_catalog.text;
    table_name  pg_catalog.text;
BEGIN
    violated := CASE
        WHEN pg_catalog.octet_length(key) OPERATOR(pg_catalog.<) 1
             OR pg_catalog.octet_length(key) OPERATOR(pg_catalog.>) 512 THEN
            'key_must_be_1_to_512_bytes'
        WHEN coalesce(pg_catalog.octet_length(body),
                      pg_catalog.octet_length(payload::pg_catalog.text))
             OPERATOR(pg_catalog.>) bytes_max THEN
            'payload_must_be_at_most_'
        WHEN pg_catalog.octet_length(tenant) OPERATOR(pg_catalog.<) 1
             OR pg_catalog.octet_length(tenant) OPERATOR(pg_catalog.>) 255 THEN
            'tenant_must_be_1_to_255_bytes'
        WHEN pg_catalog.octet_length(type) OPERATOR(pg_catalog.>) 255
             OR type OPERATOR(pg_catalog.!~)
                '^[A-Za-z0-9_][A-Za-z0-9_-]*([.][A-Za-z0-9_][A-Za-z0-9_-]*)*$' THEN
            'type_must_be_1_to_255_letters_digits_underscores_dots_dashes'
        -- See 0001_outbox.sql: operational events have an event_id of UUID version 8.
        WHEN pg_catalog.starts_with(type, 'outbox.')
             AND pg_catalog.substr(event_id::pg_catalog.text, 15, 1) OPERATOR(pg_catalog.<>) '8' THEN
            'type_outbox_is_reserved_for_operational_events'
    END;
    IF violated IS NOT NULL OR payload IS NULL OR body IS NOT NULL OR content_type IS NOT NULL
       OR headers IS NOT NULL OR expires_at IS NOT NULL THEN
        violated := coalesce(CASE
            -- See 0008_copied_bodies.sql.
            WHEN content_type OPERATOR(pg_catalog.!~)
                 ('(?i)^(?=.{1,255}$)(?!application/(json *(;|$)|cloudevents))'
                  '[-!#$%&''*+.^_`|~0-9A-Za-z]+/[-!#$%&''*+.^_`|~0-9A-Za-z]+'
                  '( *; *[-!#$%&''*+.^_`|~0-9A-Za-z]+='
                  '([-!#$%&''*+.^_`|~0-9A-Za-z]+|"[] !#-[^-~]*"))*$') THEN
                'content_type_must_be_a_media_type_except_json_and_cloudevents'
            WHEN CASE WHEN body IS NULL
                      THEN content_type IS NOT NULL OR (payload IS NULL AND erased_at IS NULL)
                      ELSE content_type IS NULL OR payload IS NOT NULL OR erased_at IS NOT NULL END
                 THEN
                'either_payload_or_body_with_content_type_must_be_set'
            WHEN erased_at IS NULL AND (
                 expires_at OPERATOR(pg_catalog.<) '0001-01-02 00:00:00+00'
                 OR expires_at OPERATOR(pg_catalog.>) '9999-12-30 00:00:00+00') THEN
                'expires_at_must_be_from_year_1_to_9999'
            -- strict mode: lax mode would unwrap an array and match its elements.
            WHEN pg_catalog.jsonb_typeof(headers) OPERATOR(pg_catalog.<>) 'object'
                 OR headers OPERATOR(pg_catalog.@?) 'strict $.* ? (@.type() != "string")' THEN
                'headers_must_be_an_object_of_strings'
            WHEN pg_catalog.octet_length(headers::pg_catalog.text) OPERATOR(pg_catalog.>) 8192 THEN
                'headers_must_be_at_most_8192_bytes'
        END, violated);
        IF violated IS NOT NULL THEN
            IF violated OPERATOR(pg_catalog.=) 'payload_must_be_at_most_' THEN
                violated := pg_catalog.concat(violated, bytes_max, '_bytes');
            END IF;
            -- An aggregate: logical replication may not know the partition.
            SELECT coalesce(pg_catalog.max(n.nspname::pg_catalog.text), ''),
                   coalesce(pg_catalog.max(c.relname::pg_catalog.text), 'outbox')
              INTO schema_name, table_name
              FROM pg_catalog.pg_class c
              JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
             WHERE c.oid OPERATOR(pg_catalog.=) relation;
            RAISE EXCEPTION USING ERRCODE = 'check_violation',
                MESSAGE = pg_catalog.format(
                    'new row for relation "%s" violates check constraint "%s"', table_name, violated),
                SCHEMA = schema_name, TABLE = table_name, CONSTRAINT = violated;
        END IF;
    END IF;
END $check$;
-- Whoever may insert or update, also through a view, executes it.  Explicitly, because default
-- privileges may have withdrawn it.
GRANT EXECUTE ON FUNCTION require_valid_event TO PUBLIC;

-- As in 0007_roles.sql, except for that function.
CREATE OR REPLACE FUNCTION sync_grants() RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    public_functions text := (
        SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc p
         WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
           AND p.oid <> 'require_valid_event'::regproc
           AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS acl
                        WHERE acl.grantee = 0));
BEGIN
    IF public_functions IS NOT NULL THEN
        EXECUTE format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', public_functions);
    END IF;
    PERFORM set_privileges(array_agg(p.role), array_agg(p.role), array_agg(p.purpose))
       FROM role_purposes() p;
END $$;

-- Adds the constraint.  NOT VALID: existing rows keep what they have, and are not read while producers
-- wait.
CREATE FUNCTION constrain_events(bytes_max integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format(
        'ALTER TABLE outbox ADD CONSTRAINT event_must_be_valid CHECK (require_valid_event('
        'tableoid, event_id, tenant, type, key, payload, headers, expires_at, erased_at, body, '
        'content_type, %s)) NOT VALID', bytes_max);
END $$;
REVOKE ALL ON FUNCTION constrain_events FROM PUBLIC;

-- Changes the limit of payloads, and of bodies where there are some.
CREATE OR REPLACE FUNCTION set_payload_bytes_max(bytes_max integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    relation text;
    size     text;
BEGIN
    IF bytes_max NOT BETWEEN 1536 AND 67108864 THEN
        RAISE EXCEPTION 'the payload limit must be between 1536 and 67108864 bytes'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR relation, size IN VALUES
        ('schedule', 'octet_length(payload::text)'),
        ('future_event', 'coalesce(octet_length(body), octet_length(payload::text))')
    LOOP
        EXECUTE format(
            'ALTER TABLE %I DROP CONSTRAINT %I, ADD CONSTRAINT %I CHECK (%s <= %s)', relation,
            'payload_must_be_at_most_' || payload_bytes_max() || '_bytes',
            'payload_must_be_at_most_' || bytes_max || '_bytes', size, bytes_max);
    END LOOP;
    ALTER TABLE outbox DROP CONSTRAINT event_must_be_valid;
    PERFORM constrain_events(bytes_max);
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION payload_bytes_max() RETURNS integer '
        'LANGUAGE sql IMMUTABLE PARALLEL SAFE AS %L', 'SELECT ' || bytes_max);
END $$;

-- Last, because producers wait for the lock.  Constraints of an empty outbox are valid: see
-- 0020_valid.sql.
DO $$
BEGIN
    EXECUTE format(
        'ALTER TABLE outbox
            DROP CONSTRAINT content_type_must_be_a_media_type_except_json_and_cloudevents,
            DROP CONSTRAINT either_payload_or_body_with_content_type_must_be_set,
            DROP CONSTRAINT expires_at_must_be_from_year_1_to_9999,
            DROP CONSTRAINT headers_must_be_an_object_of_strings,
            DROP CONSTRAINT headers_must_be_at_most_8192_bytes,
            DROP CONSTRAINT key_must_be_1_to_512_bytes,
            DROP CONSTRAINT payload_must_be_at_most_%s_bytes,
            DROP CONSTRAINT tenant_must_be_1_to_255_bytes,
            DROP CONSTRAINT type_must_be_1_to_255_letters_digits_underscores_dots_dashes,
            DROP CONSTRAINT type_outbox_is_reserved_for_operational_events',
        payload_bytes_max());
    PERFORM constrain_events(payload_bytes_max());
    IF NOT EXISTS (SELECT FROM outbox) THEN
        ALTER TABLE outbox VALIDATE CONSTRAINT event_must_be_valid;
    END IF;
END $$;
