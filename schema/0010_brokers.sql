-- Brokers as destinations: what a stream acknowledged last, and what to append to it again.
--
-- An older relay cannot deliver to a broker and would take the URL for that of an HTTP receiver.

-- What proves that a broker had a lane's messages, for brokers whose streams forget their own
-- position; see outbox/core/brokers/port.py.
CREATE TABLE lane_receipt (
    lane_id bigint PRIMARY KEY REFERENCES lane,
    receipt text   NOT NULL
) WITH (fillfactor = 50);

-- The sequence of the entry that ends the lane of an older generation in its broker's stream; NULL:
-- it has none.
ALTER TABLE lane_progress ADD COLUMN end_seq bigint;

-- What an operator lets the owner do about a held lane; see outbox/core/brokers/repair.py.  It is
-- valid until the lane delivers again: repair_seq is the last sequence that was delivered.
ALTER TABLE lane
    ADD COLUMN repair     text CHECK (repair IN ('refill', 'adopt')),
    ADD COLUMN repair_seq bigint,
    ADD CHECK ((repair IS NULL) = (repair_seq IS NULL));
CREATE INDEX lane_repair ON lane (endpoint_id) WHERE repair IS NOT NULL;

-- A new reason: 'adopted', the deliveries of a lane whose sequences do not fit into its stream.
ALTER TABLE dead_letter DROP CONSTRAINT dead_letter_reason_check;
ALTER TABLE dead_letter ADD CONSTRAINT dead_letter_reason_check
    CHECK (reason IN ('refused', 'exhausted', 'expired', 'erased', 'skipped', 'backlog', 'adopted',
                      'disabled', 'removed'));

-- As in 0009_binary_payloads.sql, with the privileges that were added since.
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
                       ('relay', 'table', 'lane_receipt', 'UPDATE', NULL))
               AS added(purpose, kind, name, privilege, columns)
         WHERE added.purpose = required_privileges.purpose;
END $$;
