-- Relays stop first.
--
-- What publishers may write: event types as other systems have them, header names that nothing of
-- ours trusts, and values that every reader can represent.  An older relay fails with a type pattern
-- that has a "-".

-- The reserved names of headers, as a regular expression; see mark_problem() in
-- outbox/core/model/headers.py.
CREATE FUNCTION reserved_header_names() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT '^((outbox|x[-_]outbox|webhook|ce|nats)[-_]'
           '|(body|content[-_]type|description|status'
           '|x[-_](attempt|backfill|delivery|event|event[-_](id|key|tenant|time)|lane|sequence))$'
           '|.*[-_](lane|lane[-_]ends|(last|previous)[-_]sequence|replay[-_]of|sequence)$)'
$$;
REVOKE ALL ON FUNCTION reserved_header_names FROM PUBLIC;

-- Headers without those that are reserved; NULL if none is left.
CREATE FUNCTION without_reserved_names(headers jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT jsonb_object_agg(h.key, h.value) FROM jsonb_each(headers) h
     WHERE h.key !~* reserved_header_names()
$$;
REVOKE ALL ON FUNCTION without_reserved_names FROM PUBLIC;

-- Why no reader can represent a payload, or NULL.  A number of 30 bytes can have 131,000 digits, so
-- the text is measured; a shorter text has neither such a number nor such a depth.
CREATE FUNCTION payload_fault(payload jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN octet_length(payload::text) <= 2000 THEN NULL
        WHEN payload @? 'strict $.** ? (@ >= 1e2000 || @ <= -1e2000)' THEN
            'a number of more than 2000 digits'
        WHEN payload @? 'strict $.**{1024}' THEN 'more than 1024 levels of arrays and objects'
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
    IF octet_length(publish.payload::text) > 2000 THEN
        PERFORM require_readable(publish.payload);
    END IF;
    RETURN publish_event(
        type => publish.type, payload => publish.payload, key => publish.key,
        tenant => publish.tenant, once => publish.once, expires_at => publish.expires_at,
        headers => publish.headers, deliver_at => publish.deliver_at,
        claimed => publish.claimed, once_for => publish.once_for);
END $$;

-- As in 0009_binary_payloads.sql.
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
    ELSIF size > 2000 THEN
        PERFORM require_readable(parsed);
    END IF;
    RETURN ARRAY[publish_event(
        type => publish_text.type, payload => parsed, key => publish_text.key,
        tenant => publish_text.tenant, once => publish_text.once,
        expires_at => greatest(clock_timestamp(), due) + make_interval(secs => expires_in_s),
        headers => publish_text.headers::jsonb, deliver_at => due,
        claimed => publish_text.claimed, once_for => make_interval(secs => once_for_s))::text];
END $$;

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
        WHEN payload_fault(e.payload) IS NOT NULL THEN 'the payload has ' || payload_fault(e.payload)
        WHEN octet_length(e.headers::text) > 8192 THEN 'the headers are larger than 8192 bytes'
        WHEN e.headers IS NOT NULL
             AND e.headers IS DISTINCT FROM coalesce(without_reserved_names(e.headers), '{}') THEN
            'the headers have a name that is reserved'
    END
$$;

-- As in 0012_adoption.sql; without reserved headers, which a row that is held already may have.
CREATE OR REPLACE FUNCTION held_event(held adopted_row) RETURNS converted_event
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    -- Not jsonb_populate_record(): it would make SQL's NULL of a payload that is JSON's null.
    SELECT ROW(event ->> 'type', event ->> 'key', event ->> 'tenant', event ->> 'once',
               CASE WHEN held.body IS NULL THEN event -> 'payload' END, held.body,
               event ->> 'content_type',
               without_reserved_names(nullif(event -> 'headers', 'null')), NULL)::converted_event
      FROM (SELECT held.event) h
$$;

-- ------------------------------------------------------------- constraints

-- Rows that an older version accepted are mended where they become events later.
UPDATE future_event SET headers = without_reserved_names(headers)
 WHERE headers IS DISTINCT FROM without_reserved_names(headers);
UPDATE schedule SET headers = without_reserved_names(headers)
 WHERE headers IS DISTINCT FROM without_reserved_names(headers);
UPDATE future_event
   SET created_at = greatest(least(created_at, '9999-12-30Z'), '0001-01-02Z'),
       expires_at = greatest(least(expires_at, '9999-12-30Z'), '0001-01-02Z'),
       deliver_at = least(deliver_at, '9999-12-29Z')
 WHERE greatest(created_at, expires_at, deliver_at) > '9999-12-30Z'
    OR least(created_at, expires_at) < '0001-01-02Z';

-- Each constraint is prepared for every statement of a producer, so names share one with types, and
-- one constraint checks all times.  NOT VALID: existing rows keep what they have.  It applies to
-- their UPDATE, so that of an erasure is excepted, which clears the other columns.
--
-- The range of times is that of every reader: Python's, in any time zone.
DO $$
DECLARE
    relation text;
    types text := '^[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*$';
    names text := format('$.keyvalue().key ? (@ like_regex %s flag "i")',
                         to_jsonb(reserved_header_names()));
BEGIN
    FOREACH relation IN ARRAY '{schedule,future_event,outbox}'::text[] LOOP
        EXECUTE format(
            'ALTER TABLE %1$I
                DROP CONSTRAINT type_must_be_dotted_segments_of_letters_digits_underscores,
                ADD CONSTRAINT type_must_be_dotted_segments_of_letters_digits_underscore_dash
                    CHECK (type ~ %2$L) %5$s,
                DROP CONSTRAINT headers_must_be_an_object_of_strings,
                ADD CONSTRAINT headers_must_be_an_object_of_strings_without_reserved_names
                    CHECK (jsonb_typeof(headers) = ''object''
                           AND NOT headers @? ''strict $.* ? (@.type() != "string")''
                           AND NOT headers @? %3$L) %5$s,
                ADD CONSTRAINT times_must_be_from_year_1_to_9999
                    CHECK (%4$s) %5$s',
            relation, types, names,
            CASE relation
                WHEN 'outbox' THEN
                    'erased_at IS NOT NULL OR least(created_at, expires_at) >= ''0001-01-02Z'' '
                    'AND greatest(created_at, expires_at) <= ''9999-12-30Z'''
                WHEN 'future_event' THEN
                    'least(created_at, expires_at) >= ''0001-01-02Z'' '
                    'AND greatest(created_at, expires_at, deliver_at) <= ''9999-12-30Z'''
                ELSE 'created_at BETWEEN ''0001-01-02Z'' AND ''9999-12-30Z'''
            END,
            CASE relation WHEN 'outbox' THEN 'NOT VALID' ELSE '' END);
    END LOOP;
END $$;
