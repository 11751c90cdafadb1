-- Relays stop first.
--
-- What publishers may write: event types as other systems have them, header names that nothing of
-- ours trusts, and values that readers can represent.  An older relay fails with a type pattern that
-- has a "-".  An older version of the package fails with publish_text(), which is now another
-- function, but not with its other statements.

-- Refuses headers of an event with a reserved name; see mark_problem() in
-- outbox/core/model/headers.py.  A plain INSERT is not checked, because a constraint would cost each
-- statement a tenth: what it has of such headers is left out at delivery.
CREATE FUNCTION require_own_headers(headers jsonb) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    reserved text;
BEGIN
    IF jsonb_typeof(headers) <> 'object' THEN
        RETURN;  -- A constraint refuses it.
    ELSIF headers - '{traceparent,tracestate}'::text[] = '{}' THEN
        RETURN;
    END IF;
    SELECT name INTO reserved FROM jsonb_object_keys(headers) AS name
     WHERE name ~* ('^((outbox|x[-_]outbox|webhook|ce|nats)[-_]'
                    '|(body|content[-_]type|description|status|x[-_](attempt|backfill|delivery|event'
                    '|event[-_](id|key|tenant|time)))$'
                    '|.*[-_](lane|lane[-_]ends|(last|previous)[-_]sequence|replay[-_]of|sequence)$)')
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'headers: "%" is set by the relay, and trusted by readers and receivers',
            reserved USING ERRCODE = 'check_violation';
    END IF;
END $$;
REVOKE ALL ON FUNCTION require_own_headers FROM PUBLIC;

-- Why no reader can represent a payload, or NULL.  A number of 30 bytes can have 131,000 digits, so
-- the text is measured; a shorter text has neither such a number nor such a depth.
CREATE FUNCTION payload_fault(payload jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN octet_length(payload::text) <= 2000 THEN NULL
        WHEN payload @? 'strict $.** ? (@ >= 1e2000 || @ <= -1e2000)' THEN
            'a number of more than 2000 digits'
        WHEN payload @? 'strict $.**{1024} ? (@.type() == "array" || @.type() == "object")' THEN 'more than 1024 levels of arrays and objects'
    END
$$;
REVOKE ALL ON FUNCTION payload_fault FROM PUBLIC;

-- Refuses a payload with a fault.  For the functions that producers call: as a constraint of the
-- table, it would cost a plain INSERT of a large payload half as much again.
CREATE FUNCTION require_readable(payload jsonb) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    fault text := payload_fault(payload);
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION 'payload: has %, which receivers cannot read; write it as a text', fault
            USING ERRCODE = 'check_violation';
    END IF;
END $$;
REVOKE ALL ON FUNCTION require_readable FROM PUBLIC;

-- ----------------------------------------------------------------- publish

-- As in 0014_absence.sql, without reserved headers.
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    new_id uuid := gen_random_uuid();
    stored_id uuid;
BEGIN
    IF starts_with(publish_event.type, 'outbox.') THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    IF publish_event.headers IS NOT NULL THEN
        PERFORM require_own_headers(publish_event.headers);
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

-- As in 0014_absence.sql, without reserved headers.
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
    IF publish_events.headers IS NOT NULL THEN
        PERFORM require_own_headers(h) FROM unnest(publish_events.headers) AS h WHERE h IS NOT NULL;
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

CREATE OR REPLACE FUNCTION publish(
    type       text,
    payload    jsonb,
    key        text        DEFAULT NULL,
    tenant     text        DEFAULT NULL,
    once       text        DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers    jsonb       DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL,
    claimed    boolean     DEFAULT false,
    once_for   interval    DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
BEGIN
    -- Here and not in publish_event(), because publish_checked() needs the size, too.
    IF octet_length(publish.payload::text) > 2000 THEN
        PERFORM require_readable(publish.payload);
    END IF;
    RETURN publish_event(
        type => publish.type, payload => publish.payload, key => publish.key,
        tenant => publish.tenant, once => publish.once, expires_at => publish.expires_at,
        headers => publish.headers, deliver_at => publish.deliver_at,
        claimed => publish.claimed, once_for => publish.once_for);
END $$;

-- For the package's client library: reports a payload that is too large without an error; see
-- 0001_outbox.sql.  Renamed and not dropped, because it keeps its privileges then, and a statement
-- that calls it twice, or a function that calls it, goes on.
ALTER FUNCTION publish_text(text, text, text, text, text, text, text, float8, float8, boolean)
    RENAME TO publish_checked;
CREATE OR REPLACE FUNCTION publish_checked(
    type         text,
    payload      text,
    key          text    DEFAULT NULL,
    tenant       text    DEFAULT NULL,
    once         text    DEFAULT NULL,
    headers      text    DEFAULT NULL,
    deliver_at   text    DEFAULT NULL,
    expires_in_s float8  DEFAULT NULL,
    once_for_s   float8  DEFAULT NULL,
    claimed      boolean DEFAULT false
) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    parsed jsonb       := publish_checked.payload;
    size   integer     := octet_length(parsed::text);
    due    timestamptz := publish_checked.deliver_at;
BEGIN
    IF size > payload_bytes_max() THEN
        RETURN ARRAY[NULL, size::text, payload_bytes_max()::text];
    ELSIF size > 2000 THEN
        PERFORM require_readable(parsed);
    END IF;
    RETURN ARRAY[publish_event(
        type => publish_checked.type, payload => parsed, key => publish_checked.key,
        tenant => publish_checked.tenant, once => publish_checked.once,
        expires_at => greatest(clock_timestamp(), due) + make_interval(secs => expires_in_s),
        headers => publish_checked.headers::jsonb, deliver_at => due,
        claimed => publish_checked.claimed, once_for => make_interval(secs => once_for_s))::text];
END $$;

-- As publish(), with the payload and the headers as JSON text.  For programs in any language: some
-- drivers encode a parameter of the type jsonb themselves, and make a JSON string of JSON text.
CREATE FUNCTION publish_text(
    type       text,
    payload    text,
    key        text        DEFAULT NULL,
    tenant     text        DEFAULT NULL,
    once       text        DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers    text        DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL,
    once_for   interval    DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
BEGIN
    RETURN publish(
        type => publish_text.type, payload => publish_text.payload::jsonb,
        key => publish_text.key, tenant => publish_text.tenant, once => publish_text.once,
        expires_at => publish_text.expires_at, headers => publish_text.headers::jsonb,
        deliver_at => publish_text.deliver_at, once_for => publish_text.once_for);
END $$;
REVOKE ALL ON FUNCTION publish_text FROM PUBLIC;

-- Who could call the one may call the other, also a role that was granted it by hand.
DO $$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT acl.grantee::regrole AS role, acl.is_grantable
          FROM pg_proc p CROSS JOIN aclexplode(p.proacl) AS acl
         WHERE p.oid = 'publish_checked'::regproc AND acl.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION publish_text TO %s %s', held.role,
                       CASE WHEN held.is_grantable THEN 'WITH GRANT OPTION' END);
    END LOOP;
END $$;

-- As in 0007_roles.sql, with publish_checked().
CREATE OR REPLACE FUNCTION producer_privileges() RETURNS SETOF required_privilege
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    VALUES
        ('table', 'outbox', 'INSERT',
         '{tenant,type,key,payload,headers,expires_at}'::text[], NULL::text[]),
        ('function', 'publish', 'EXECUTE', NULL, NULL),
        ('function', 'publish_text', 'EXECUTE', NULL, NULL),
        ('function', 'publish_checked', 'EXECUTE', NULL, NULL),
        ('function', 'publish_many', 'EXECUTE', NULL, NULL),
        ('function', 'claim_once', 'EXECUTE', NULL, NULL),
        ('function', 'reset_once', 'EXECUTE', NULL, NULL),
        ('function', 'payload_bytes_max', 'EXECUTE', NULL, NULL)
$$;

CREATE OR REPLACE FUNCTION publish_many(
    types      text[],
    payloads   jsonb[],
    keys       text[]        DEFAULT NULL,
    tenants    text[]        DEFAULT NULL,
    onces      text[]        DEFAULT NULL,
    expires_at timestamptz[] DEFAULT NULL,
    headers    jsonb[]       DEFAULT NULL,
    deliver_at timestamptz[] DEFAULT NULL,
    once_for   interval[]    DEFAULT NULL,
    digests    bytea[]       DEFAULT NULL
) RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
BEGIN
    PERFORM require_readable(p) FROM unnest(payloads) p WHERE octet_length(p::text) > 2000;
    RETURN publish_events(
        types => publish_many.types, payloads => publish_many.payloads,
        keys => publish_many.keys, tenants => publish_many.tenants,
        onces => publish_many.onces, expires_at => publish_many.expires_at,
        headers => publish_many.headers, deliver_at => publish_many.deliver_at,
        once_for => publish_many.once_for, digests => publish_many.digests);
END $$;

-- ---------------------------------------------------------------- adoption

-- As in 0012_adoption.sql, with "-" in segments, but not as their first character.
CREATE OR REPLACE FUNCTION clean_event_type(name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT array_to_string(array_remove(regexp_split_to_array(
        regexp_replace(trim(name), '[^A-Za-z0-9_.:/-]+', '_', 'g'), '(^|[.:/])[.:/-]*'), ''), '.')
$$;

-- As in 0012_adoption.sql.
CREATE OR REPLACE FUNCTION event_fault(e converted_event) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN e.fault IS NOT NULL THEN e.fault
        WHEN coalesce(e.type, '') = '' THEN 'the type is empty'
        WHEN octet_length(e.type) > 248 THEN 'the type is longer than 248 bytes'
        WHEN e.type !~ '^[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*$' THEN
            'the type has characters besides letters, digits, "_", "-" and ".", or begins a '
            'segment with "-"'
        WHEN starts_with(e.type || '.', 'outbox.') OR starts_with(e.type || '.', 'shadow.') THEN
            'types that begin with "outbox." or "shadow." are reserved'
        WHEN octet_length(e.key) NOT BETWEEN 1 AND 512 THEN
            'the key is empty or longer than 512 bytes'
        WHEN octet_length(e.tenant) NOT BETWEEN 1 AND 255 THEN
            'the tenant is empty or longer than 255 bytes'
        WHEN octet_length(e.once) NOT BETWEEN 1 AND 512 THEN
            'the idempotency key is empty or longer than 512 bytes'
        WHEN e.payload IS NULL AND e.body IS NULL THEN 'the payload is not valid JSON'
        WHEN coalesce(octet_length(e.body), octet_length(e.payload::text)) > payload_bytes_max() THEN
            'the payload is larger than ' || payload_bytes_max() || ' bytes'
        WHEN payload_fault(e.payload) IS NOT NULL THEN
            'the payload has ' || payload_fault(e.payload)
        WHEN octet_length(e.headers::text) > 8192 THEN 'the headers are larger than 8192 bytes'
    END
$$;

-- ------------------------------------------------------------- constraints

-- What an older version accepted is mended where it becomes an event later.  The range of times is
-- that of every reader: Python's, in any time zone.
UPDATE future_event SET deliver_at = greatest(least(deliver_at, '9999-12-29Z'), '0001-01-02Z'),
                        expires_at = greatest(least(expires_at, '9999-12-30Z'), '0001-01-03Z')
 WHERE greatest(deliver_at, expires_at) > '9999-12-30Z'
    OR least(deliver_at, expires_at) < '0001-01-02Z';
ALTER TABLE future_event
    DROP CONSTRAINT deliver_at_must_be_finite,
    ADD CONSTRAINT deliver_at_must_be_from_year_1_to_9999
        CHECK (deliver_at BETWEEN '0001-01-02Z' AND '9999-12-30Z'),
    ADD CONSTRAINT expires_at_must_be_from_year_1_to_9999
        CHECK (expires_at BETWEEN '0001-01-02Z' AND '9999-12-30Z');

-- Few constraints, and short ones, because each is prepared for every statement of a producer.
-- NOT VALID: existing rows keep what they have.  A constraint applies to their UPDATE, so that of an
-- erasure is excepted, which clears the other columns.
DO $$
DECLARE
    relation text;
BEGIN
    FOREACH relation IN ARRAY '{schedule,future_event,outbox}'::text[] LOOP
        EXECUTE format(
            'ALTER TABLE %I
                DROP CONSTRAINT type_must_be_at_most_255_bytes,
                DROP CONSTRAINT type_must_be_dotted_segments_of_letters_digits_underscores,
                ADD CONSTRAINT type_must_be_1_to_255_letters_digits_underscores_dots_dashes
                    CHECK (octet_length(type) <= 255 AND type ~ %L) %s',
            relation, '^[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*$',
            CASE relation WHEN 'outbox' THEN 'NOT VALID' ELSE '' END);
    END LOOP;
END $$;

ALTER TABLE outbox ADD CONSTRAINT expires_at_must_be_from_year_1_to_9999
    CHECK (erased_at IS NOT NULL OR expires_at BETWEEN '0001-01-02Z' AND '9999-12-30Z') NOT VALID;
