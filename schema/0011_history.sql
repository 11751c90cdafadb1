-- Compatible with programs of version 10.
-- Delivery history: successes, failures and latencies of the last 24 hours, in intervals of five
-- minutes; see outbox/core/delivery/delivery_history.py.
--
-- A ring: the row of an interval replaces that of the same interval the day before, so that the
-- table does not grow and nothing has to be deleted.  The zero id has the sum over all endpoints.
CREATE TABLE delivery_history (
    endpoint_id uuid        NOT NULL,
    slot        smallint    NOT NULL CHECK (slot BETWEEN 0 AND 287),  -- of the day, in UTC
    began_at    timestamptz NOT NULL,
    successes   bigint      NOT NULL,  -- acknowledged deliveries
    failures    bigint      NOT NULL,  -- requests that failed
    latencies   bigint[]    NOT NULL CHECK (cardinality(latencies) = 13),  -- histogram of successes
    PRIMARY KEY (endpoint_id, slot)
) WITH (fillfactor = 50);

-- As in 0010_brokers.sql, with the privileges that were added since.
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
                       ('relay', 'table', 'delivery_history', 'DELETE', NULL))
               AS added(purpose, kind, name, privilege, columns)
         WHERE added.purpose = required_privileges.purpose;
END $$;
