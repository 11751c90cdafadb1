-- Compatible with programs of version 11.
-- Adoption of another outbox table (`outbox adopt`): which tables, and what became of their rows;
-- see outbox/operations/adopt/.
--
-- A trigger on the adopted table reads each row by that adoption's mapping of columns and calls
-- adopt_row(), in the application's transaction.  Its definition names the phase, so that a change
-- of phase replaces the trigger: that waits for all transactions that have written to the table,
-- and later ones wait for it.  Each row therefore belongs to exactly one phase.

CREATE TABLE adoption (
    id           integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source       text        NOT NULL UNIQUE,   -- schema and name of the table, quoted
    phase        text        NOT NULL CHECK (
        phase IN ('dual_run', 'held', 'cut_over', 'returning', 'ended')),
    mapping      jsonb       NOT NULL,          -- as in outbox/core/adoption/mapping.py
    boundary     text,                          -- highest value of its order when the dual run
                                                -- began; NULL: there is none
    began_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    held_at      timestamptz,                   -- when rows were last hidden from the old poller
    cut_over_at  timestamptz
);

-- The ledger: one row per row of an adopted table since its dual run began, and per row that was
-- pending at the cut-over.
CREATE TABLE adopted_row (
    adoption     integer     NOT NULL,          -- no foreign key: each application would lock its row
    source_id    text        NOT NULL,          -- value of the adopted row's id column
    state        text        NOT NULL CHECK (state IN (
        'rehearsed',   -- dual run: published with the prefix "shadow."; the old poller sends it
        'held',        -- hidden from the old poller; its event is in this row
        'published',   -- its event is in the outbox
        'duplicate',   -- an earlier row has the same idempotency key
        'sent',        -- the old poller reported that it sent a held row
        'rejected')),  -- no event can be made of it; the old outbox still has it as pending
    fault        text,                          -- of a rejected row
    event_id     uuid,                          -- of the (shadow) event
    backlog      boolean     NOT NULL DEFAULT false,  -- was pending when the cut-over began
    was_held     boolean     NOT NULL DEFAULT false,  -- was published from the ledger
    sent_too     boolean     NOT NULL DEFAULT false,  -- the old poller sent it after its publication
    recorded_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- While it is held: its order in the table as text, its event, and the event's payload if
    -- that is not JSON.  The adopted row itself may be gone: it looks as if it were sent.
    source_order text,
    event        jsonb,
    body         bytea,
    source_row   jsonb,                         -- if the adopted row was deleted to hide it
    PRIMARY KEY (adoption, source_id)
);
CREATE INDEX adopted_row_held ON adopted_row (adoption) WHERE state = 'held';
CREATE INDEX adopted_row_rejected ON adopted_row (adoption) WHERE state = 'rejected';

-- The event that a row becomes by the mapping of columns.  A fault: no event can be made of it.
CREATE TYPE converted_event AS (
    type         text,
    key          text,
    tenant       text,
    once         text,
    payload      jsonb,
    body         bytea,
    content_type text,
    headers      jsonb,
    fault        text
);

-- An event type from another system's name: ":" and "/" separate segments, every other run of
-- characters that a type cannot have becomes "_", and empty segments are left out.
CREATE FUNCTION clean_event_type(name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT array_to_string(array_remove(regexp_split_to_array(
        regexp_replace(trim(name), '[^A-Za-z0-9_.:/]+', '_', 'g'), '[.:/]+'), ''), '.')
$$;
REVOKE ALL ON FUNCTION clean_event_type FROM PUBLIC;

-- The JSON value of a text, or NULL if it is no JSON.
CREATE FUNCTION json_or_null(source text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN source::jsonb;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION json_or_null FROM PUBLIC;

-- Why the outbox would reject an event, or NULL; as its constraints do, which would abort the
-- application's transaction.
CREATE FUNCTION event_fault(e converted_event) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN e.fault IS NOT NULL THEN e.fault
        WHEN coalesce(e.type, '') = '' THEN 'the type is empty'
        WHEN octet_length(e.type) > 248 THEN 'the type is longer than 248 bytes'
        WHEN e.type !~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$' THEN
            'the type has characters besides letters, digits, "_" and "."'
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
        WHEN octet_length(e.headers::text) > 8192 THEN 'the headers are larger than 8192 bytes'
    END
$$;
REVOKE ALL ON FUNCTION event_fault FROM PUBLIC;

-- Records what becomes of one adopted row, and returns its state.  Called by the trigger, for a
-- row that is pending; in the phases "held" and "cut_over" the trigger hides the row from the old
-- poller afterwards, unless it is rejected.
CREATE FUNCTION adopt_row(
    for_adoption integer, phase text, id text, source_order text, e converted_event
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    rejection text := event_fault(e);
    new_state text;
    new_event uuid;
BEGIN
    -- A row that returns to the table: what was published of it is not published again.
    IF phase <> 'dual_run' AND EXISTS (
        SELECT FROM adopted_row a WHERE a.adoption = for_adoption AND a.source_id = id
           AND a.state IN ('held', 'published', 'duplicate')
    ) THEN
        RETURN 'published';
    END IF;
    IF rejection IS NOT NULL THEN
        new_state := 'rejected';
    ELSIF phase IN ('dual_run', 'cut_over') THEN
        -- The idempotency key is claimed by the event that is delivered, not by its rehearsal.
        new_event := publish_event(
            type => CASE phase WHEN 'dual_run' THEN 'shadow.' ELSE '' END || e.type,
            payload => e.payload, key => e.key, tenant => e.tenant,
            once => CASE phase WHEN 'cut_over' THEN e.once END,
            headers => e.headers, body => e.body, content_type => e.content_type);
        new_state := CASE WHEN phase = 'dual_run' THEN 'rehearsed'
                          WHEN new_event IS NULL THEN 'duplicate' ELSE 'published' END;
    ELSE
        new_state := 'held';
    END IF;
    INSERT INTO adopted_row AS a
           (adoption, source_id, state, fault, event_id, source_order, event, body)
    VALUES (for_adoption, id, new_state, rejection, new_event, adopt_row.source_order,
            CASE new_state WHEN 'held' THEN to_jsonb(e) - 'body' END,
            CASE new_state WHEN 'held' THEN e.body END)
    ON CONFLICT (adoption, source_id) DO UPDATE
       SET state = excluded.state, fault = excluded.fault, event_id = excluded.event_id,
           source_order = excluded.source_order, event = excluded.event, body = excluded.body,
           recorded_at = excluded.recorded_at;
    RETURN new_state;
END $$;
REVOKE ALL ON FUNCTION adopt_row FROM PUBLIC;

-- The event of a held row.
CREATE FUNCTION held_event(held adopted_row) RETURNS converted_event
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    -- Not jsonb_populate_record(): it would make SQL's NULL of a payload that is JSON's null.
    SELECT ROW(event ->> 'type', event ->> 'key', event ->> 'tenant', event ->> 'once',
               CASE WHEN held.body IS NULL THEN event -> 'payload' END, held.body,
               event ->> 'content_type', nullif(event -> 'headers', 'null'), NULL)::converted_event
      FROM (SELECT held.event) h
$$;
REVOKE ALL ON FUNCTION held_event FROM PUBLIC;

-- Publishes held rows in the order of `ids`.
CREATE FUNCTION publish_held(for_adoption integer, ids text[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    ordered text[];
    events  uuid[];
BEGIN
    SELECT array_agg(h.source_id ORDER BY h.n),
           publish_events(
               types => array_agg((h.e).type ORDER BY h.n),
               payloads => array_agg((h.e).payload ORDER BY h.n),
               keys => array_agg((h.e).key ORDER BY h.n),
               tenants => array_agg((h.e).tenant ORDER BY h.n),
               onces => array_agg((h.e).once ORDER BY h.n),
               headers => array_agg((h.e).headers ORDER BY h.n),
               bodies => array_agg((h.e).body ORDER BY h.n),
               content_types => array_agg((h.e).content_type ORDER BY h.n))
      INTO ordered, events
      FROM (SELECT w.n, a.source_id, held_event(a) AS e
              FROM unnest(ids) WITH ORDINALITY AS w(id, n)
              JOIN adopted_row a ON a.adoption = for_adoption AND a.source_id = w.id
             WHERE a.state = 'held' FOR UPDATE OF a) h;
    UPDATE adopted_row a
       SET state = CASE WHEN p.event_id IS NULL THEN 'duplicate' ELSE 'published' END,
           was_held = true, event_id = p.event_id, recorded_at = clock_timestamp(),
           source_order = NULL, event = NULL, body = NULL, source_row = NULL
      FROM unnest(ordered, events) AS p(id, event_id)
     WHERE a.adoption = for_adoption AND a.source_id = p.id;
END $$;
REVOKE ALL ON FUNCTION publish_held FROM PUBLIC;

-- Records that the old poller marked a hidden row as sent: it had read the row before.
CREATE FUNCTION record_sent(for_adoption integer, id text) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    UPDATE adopted_row a
       SET state = CASE a.state WHEN 'held' THEN 'sent' ELSE a.state END,
           sent_too = a.sent_too OR a.state = 'published',
           event = NULL, body = NULL
     WHERE a.adoption = for_adoption AND a.source_id = id AND a.state IN ('held', 'published')
$$;
REVOKE ALL ON FUNCTION record_sent FROM PUBLIC;

-- As in 0011_history.sql, with the privileges that were added since.
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
                       ('operator', 'table', 'adopted_row', 'SELECT', NULL))
               AS added(purpose, kind, name, privilege, columns)
         WHERE added.purpose = required_privileges.purpose;
END $$;
