-- Payloads that are not JSON, in the outbox; see 0008_copied_bodies.sql.
--
-- No older relay is compatible, because it would take an event with a body for an erased one.
-- Producers are: they may insert without the new columns, and the functions that they call keep
-- their arguments.  No function is dropped, because a statement that calls it twice would fail.

-- ----------------------------------------------------------------- publish

-- Publishes one event with a payload, or with a body and its content type; see publish().
CREATE FUNCTION publish_event(
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
    IF publish_event.deliver_at > clock_timestamp() THEN
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  body, content_type, deliver_at)
        VALUES (new_id, publish_event.tenant, publish_event.type, publish_event.key,
                publish_event.payload, publish_event.headers, publish_event.expires_at,
                publish_event.body, publish_event.content_type, publish_event.deliver_at);
    ELSE
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at,
                            body, content_type)
        VALUES (new_id, publish_event.tenant, publish_event.type, publish_event.key,
                publish_event.payload, publish_event.headers, publish_event.expires_at,
                publish_event.body, publish_event.content_type);
    END IF;
    RETURN new_id;
END $$;
REVOKE ALL ON FUNCTION publish_event FROM PUBLIC;

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
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN publish_event(
        type => publish.type, payload => publish.payload, key => publish.key,
        tenant => publish.tenant, once => publish.once, expires_at => publish.expires_at,
        headers => publish.headers, deliver_at => publish.deliver_at,
        claimed => publish.claimed, once_for => publish.once_for);
END $$;

-- Calls publish_event() itself, because each call within a call costs producers.  SECURITY DEFINER:
-- a role may have the privilege to call this function alone.
CREATE OR REPLACE FUNCTION publish_text(
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    parsed jsonb       := publish_text.payload;
    size   integer     := octet_length(parsed::text);
    due    timestamptz := publish_text.deliver_at;
BEGIN
    IF size > payload_bytes_max() THEN
        RETURN ARRAY[NULL, size::text, payload_bytes_max()::text];
    END IF;
    RETURN ARRAY[publish_event(
        type => publish_text.type, payload => parsed, key => publish_text.key,
        tenant => publish_text.tenant, once => publish_text.once,
        expires_at => greatest(clock_timestamp(), due) + make_interval(secs => expires_in_s),
        headers => publish_text.headers::jsonb, deliver_at => due,
        claimed => publish_text.claimed, once_for => make_interval(secs => once_for_s))::text];
END $$;

-- Publishes many events, each with a payload or a body; see publish_many().
CREATE FUNCTION publish_events(
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
          FROM accepted a WHERE NOT a.is_delayed ORDER BY a.n),
    delayed AS (
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  body, content_type, deliver_at)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at,
               a.body, a.content_type, a.deliver_at
          FROM accepted a WHERE a.is_delayed ORDER BY a.n)
    SELECT array_agg(a.event_id ORDER BY r.n) INTO event_ids
      FROM requested r LEFT JOIN accepted a ON a.n = r.n;
    RETURN event_ids;
END $$;
REVOKE ALL ON FUNCTION publish_events FROM PUBLIC;

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
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN publish_events(
        types => publish_many.types, payloads => publish_many.payloads,
        keys => publish_many.keys, tenants => publish_many.tenants,
        onces => publish_many.onces, expires_at => publish_many.expires_at,
        headers => publish_many.headers, deliver_at => publish_many.deliver_at,
        once_for => publish_many.once_for, digests => publish_many.digests);
END $$;

-- -------------------------------------------------------------- privileges

-- As in 0007_roles.sql, with the privileges that were added later.
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
        SELECT added.kind, added.name, added.privilege,
               CASE added.kind WHEN 'table' THEN '{body,content_type}'::text[] END
          FROM (VALUES ('producer', 'table', 'outbox', 'INSERT'),
                       ('producer', 'function', 'publish_event', 'EXECUTE'),
                       ('producer', 'function', 'publish_events', 'EXECUTE'),
                       ('relay', 'table', 'outbox', 'INSERT'),
                       ('operator', 'table', 'outbox', 'UPDATE'),
                       ('operator', 'table', 'dead_letter', 'UPDATE'))
               AS added(purpose, kind, name, privilege)
         WHERE added.purpose = required_privileges.purpose;
END $$;

-- -------------------------------------------------------------- the outbox

-- Last, because producers wait for the lock.  An older program that would erase an event and leave
-- its body fails.
ALTER TABLE outbox DROP CONSTRAINT payload_must_not_be_null;
DO $$ BEGIN PERFORM add_body('outbox', '(erased_at IS NOT NULL)'); END $$;
DROP FUNCTION add_body;
