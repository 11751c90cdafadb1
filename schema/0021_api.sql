-- Compatible with programs of version 20.

-- Totals of the installation in intervals of ten seconds, for an hour; see
-- outbox/store/installation_history.py.
--
-- A ring: the row with number n replaces the one with number n - 360, so that the table does not grow.
-- The numbers have the order in which the rows were written, whatever the clock did.
CREATE TABLE installation_history (
    slot       smallint    PRIMARY KEY CHECK (slot BETWEEN 0 AND 359),  -- n % 360
    n          bigint      NOT NULL,
    at         timestamptz NOT NULL,  -- end of the interval
    seconds    float8,                -- its length; NULL: unknown, and there are no counts
    events     bigint,                -- events sequenced in it
    deliveries bigint,                -- deliveries created in it
    completed  bigint,                -- deliveries acknowledged or dead-lettered in it
    pending    bigint      NOT NULL,  -- pending deliveries at its end
    -- From these the counts of the next row are computed.
    batch      bigint      NOT NULL,  -- the last batch
    sequenced  bigint      NOT NULL,  -- the sum of the lanes' last sequence numbers
    acked      bigint      NOT NULL   -- the sum of the lanes' checkpoints
) WITH (fillfactor = 50);

-- As in 0018_incarnation.sql, with the privileges that were added since.
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
                       ('operator', 'table', 'adopted_row', 'SELECT', NULL),
                       ('relay', 'table', 'future_event', 'UPDATE', '{retry_at,problem}'),
                       ('relay', 'function', 'guard_events', 'EXECUTE', NULL),
                       ('relay', 'function', 'advance_sequences', 'EXECUTE', NULL),
                       ('relay', 'table', 'odometer', 'INSERT', NULL),
                       ('relay', 'table', 'odometer', 'UPDATE', NULL),
                       ('relay', 'table', 'odometer_mark', 'INSERT', NULL),
                       ('relay', 'table', 'odometer_mark', 'UPDATE', NULL),
                       ('relay', 'table', 'odometer_mark', 'DELETE', NULL),
                       ('relay', 'table', 'incarnation', 'INSERT', NULL),
                       ('relay', 'table', 'incarnation', 'UPDATE', NULL),
                       ('operator', 'sequence', 'replay_job_id_seq', 'UPDATE', NULL),
                       ('relay', 'table', 'installation_history', 'INSERT', NULL),
                       ('relay', 'table', 'installation_history', 'UPDATE', NULL))
               AS added(purpose, kind, name, privilege, columns)
         WHERE added.purpose = required_privileges.purpose;
    RETURN QUERY
        SELECT a.kind, a.name, a.privilege, NULL::text[]
          FROM (VALUES ('table', 'event_account', 'SELECT'),
                       ('table', 'event_block', 'SELECT'),
                       ('table', 'event_void', 'SELECT'),
                       ('table', 'odometer', 'SELECT'),
                       ('table', 'odometer_mark', 'SELECT'),
                       ('table', 'incarnation', 'SELECT'),
                       ('table', 'installation_history', 'SELECT'),
                       ('function', 'observed_before', 'EXECUTE'),
                       ('function', 'account', 'EXECUTE'),
                       ('function', 'accounted_ids', 'EXECUTE'),
                       ('function', 'block_ids', 'EXECUTE'),
                       ('function', 'expected_events', 'EXECUTE'),
                       ('function', 'open_ids', 'EXECUTE'),
                       ('function', 'unsequenced_events', 'EXECUTE'),
                       ('function', 'incarnation_holds', 'EXECUTE'),
                       ('function', 'insert_filters', 'EXECUTE'),
                       ('function', 'missing_guards', 'EXECUTE'),
                       ('function', 'require_stored', 'EXECUTE'),
                       ('function', 'sequences_behind', 'EXECUTE'),
                       ('function', 'server_fence', 'EXECUTE'),
                       ('function', 'suppressed_insert', 'EXECUTE'))
               AS a(kind, name, privilege)
         WHERE purpose IN ('reader', 'operator', 'relay');
    RETURN QUERY
        SELECT 'function', f.name, 'EXECUTE', NULL::text[]
          FROM unnest('{account_batches,blocks_to_examine,examine_block}'::text[]) AS f(name)
         WHERE purpose = 'relay';
END $$;
