-- Compatible with programs of version 16.
--
-- Observed time: what ends something after a while (an endpoint without a success, the age of a
-- delivery or of a backlog, retention) counts only time in which a relay ran.  Otherwise a relay
-- that was off, a restored dump or a step of the clock would end it before anybody had tried.

-- Seconds in which a relay held a lease, and the replica that adds to them in its renewals.  A
-- relay of an older version never adds.
CREATE TABLE odometer (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    seconds float8  NOT NULL DEFAULT 0,
    adder   bigint  -- no reference: it remains after its replica has ended
);
INSERT INTO odometer DEFAULT VALUES;

-- Readings of the odometer with the database's time: what has a stored time needs no reading of its
-- own.  At most one per minute and adder; maintenance thins them.
CREATE TABLE odometer_mark (
    seconds float8      PRIMARY KEY,
    at      timestamptz NOT NULL
);
-- Times before it count from here.
INSERT INTO odometer_mark VALUES (0, clock_timestamp());

-- The time before which a stored time has been observed for so many seconds: the same lookup as
-- `Odometer.since` in outbox/core/cluster/observed_time.py, for statements that compare many rows.
-- A mark counts only if no later one has an earlier time, because the clock was set back.
CREATE FUNCTION observed_before(seconds float8) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN observed_before.seconds <= 0 THEN 'infinity' ELSE coalesce((
        SELECT least(m.at + make_interval(secs => o.seconds - observed_before.seconds - m.seconds),
                     (SELECT min(later.at) FROM odometer_mark later WHERE later.seconds > m.seconds))
          FROM odometer o JOIN odometer_mark m ON m.seconds <= o.seconds - observed_before.seconds
         WHERE NOT EXISTS (SELECT FROM odometer_mark later
                            WHERE later.seconds > m.seconds AND later.at <= m.at)
         ORDER BY m.seconds DESC LIMIT 1), '-infinity') END
$$;
REVOKE ALL ON FUNCTION observed_before FROM PUBLIC;

-- As in 0014_absence.sql, with the privileges that were added since.
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
                       ('relay', 'table', 'odometer', 'UPDATE', NULL),
                       ('relay', 'table', 'odometer_mark', 'INSERT', NULL),
                       ('relay', 'table', 'odometer_mark', 'UPDATE', NULL),
                       ('relay', 'table', 'odometer_mark', 'DELETE', NULL))
               AS added(purpose, kind, name, privilege, columns)
         WHERE added.purpose = required_privileges.purpose;
    RETURN QUERY
        SELECT a.kind, a.name, a.privilege, NULL::text[]
          FROM (VALUES ('table', 'event_account', 'SELECT'),
                       ('table', 'event_block', 'SELECT'),
                       ('table', 'event_void', 'SELECT'),
                       ('table', 'odometer', 'SELECT'),
                       ('table', 'odometer_mark', 'SELECT'),
                       ('function', 'observed_before', 'EXECUTE'),
                       ('function', 'account', 'EXECUTE'),
                       ('function', 'accounted_ids', 'EXECUTE'),
                       ('function', 'block_ids', 'EXECUTE'),
                       ('function', 'expected_events', 'EXECUTE'),
                       ('function', 'open_ids', 'EXECUTE'),
                       ('function', 'unsequenced_events', 'EXECUTE'),
                       ('function', 'insert_filters', 'EXECUTE'),
                       ('function', 'missing_guards', 'EXECUTE'),
                       ('function', 'require_stored', 'EXECUTE'),
                       ('function', 'sequences_behind', 'EXECUTE'),
                       ('function', 'suppressed_insert', 'EXECUTE'))
               AS a(kind, name, privilege)
         WHERE purpose IN ('reader', 'operator', 'relay');
    RETURN QUERY
        SELECT 'function', f.name, 'EXECUTE', NULL::text[]
          FROM unnest('{account_batches,blocks_to_examine,examine_block}'::text[]) AS f(name)
         WHERE purpose = 'relay';
END $$;
