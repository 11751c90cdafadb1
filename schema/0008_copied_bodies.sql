-- Compatible with programs of version 7.
--
-- Payloads that are not JSON: an event has either a payload, or a body with its content type.
-- Here for the copies of events, which are dead letters and delayed events; the outbox follows in
-- 0009_binary_payloads.sql.  Each file locks one of the tables that producers write: both at once
-- would deadlock with transactions that write both.

-- Changes the limit of payloads, and of bodies where there are some; see 0001_outbox.sql.
CREATE OR REPLACE FUNCTION set_payload_bytes_max(bytes_max integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    relation text;
BEGIN
    IF bytes_max NOT BETWEEN 1536 AND 67108864 THEN
        RAISE EXCEPTION 'the payload limit must be between 1536 and 67108864 bytes'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOREACH relation IN ARRAY '{schedule,future_event,outbox}'::text[] LOOP
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT %I', relation,
                       'payload_must_be_at_most_' || payload_bytes_max() || '_bytes');
        EXECUTE format(
            'ALTER TABLE %I ADD CONSTRAINT %I CHECK (%s <= %s) %s',
            relation, 'payload_must_be_at_most_' || bytes_max || '_bytes',
            CASE WHEN EXISTS (SELECT FROM pg_attribute
                               WHERE attrelid = quote_ident(relation)::regclass
                                 AND attname = 'body')
                 THEN 'coalesce(octet_length(body), octet_length(payload::text))'
                 ELSE 'octet_length(payload::text)' END,
            bytes_max, CASE relation WHEN 'outbox' THEN 'NOT VALID' ELSE '' END);
    END LOOP;
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION payload_bytes_max() RETURNS integer '
        'LANGUAGE sql IMMUTABLE PARALLEL SAFE AS %L', 'SELECT ' || bytes_max);
END $$;

-- Adds the two columns to a table of events.  Existing rows have no body, so a constraint on a
-- table that has rows is NOT VALID: checking them would take long while producers wait.  There are
-- few constraints, and short ones, because each is prepared for every statement of a producer.
CREATE FUNCTION add_body(relation text, is_erased text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    -- A media type with parameters (RFC 9110, section 8.3.1), as it is sent in a header.  Receivers
    -- read the excepted ones as the JSON of a payload, or as an event of its own.
    name       text := '[-!#$%&''*+.^_`|~0-9A-Za-z]+';
    media_type text := format('(?i)^(?=.{1,255}$)(?!application/(json *(;|$)|cloudevents))'
                              '%1$s/%1$s( *; *%1$s=(%1$s|"[] !#-[^-~]*"))*$', name);
    has_rows   boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I)', relation) INTO has_rows;
    EXECUTE format('
        ALTER TABLE %1$I
            ADD COLUMN body bytea,
            ADD COLUMN content_type text,
            DROP CONSTRAINT payload_must_be_at_most_%2$s_bytes,
            ADD CONSTRAINT payload_must_be_at_most_%2$s_bytes
                CHECK (coalesce(octet_length(body), octet_length(payload::text)) <= %2$s) %5$s,
            ADD CONSTRAINT either_payload_or_body_with_content_type_must_be_set
                CHECK (CASE WHEN body IS NULL
                            THEN content_type IS NULL AND (payload IS NOT NULL OR %4$s)
                            ELSE content_type IS NOT NULL AND payload IS NULL AND NOT %4$s END)
                %5$s,
            ADD CONSTRAINT content_type_must_be_a_media_type_except_json_and_cloudevents
                CHECK (content_type ~ %3$L) %5$s',
        relation, payload_bytes_max(), media_type, is_erased,
        CASE WHEN has_rows THEN 'NOT VALID' ELSE '' END);
END $$;
REVOKE ALL ON FUNCTION add_body FROM PUBLIC;

ALTER TABLE dead_letter ADD COLUMN body bytea, ADD COLUMN content_type text;

ALTER TABLE future_event ALTER payload DROP NOT NULL;
DO $$ BEGIN PERFORM add_body('future_event', 'false'); END $$;
