-- Relays stop first.
--
-- The state proves that it was not restored.  A dump that is restored into the same database has
-- the same timeline and the same identity, so a row says which transaction wrote it: PostgreSQL
-- keeps that in `xmin` through VACUUM FULL, CLUSTER, FREEZE and pg_upgrade, and no dump contains it.
-- An older program adds lanes whose counters say nothing, and does not begin new lanes for them.

-- ------------------------------------------------------------------ the incarnation

-- The state of the relay is the one that relays have written here only if `by_xid` is the `xmin` of
-- this row.  Otherwise the leader begins new lanes before it sequences.
CREATE TABLE incarnation (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    id     uuid    NOT NULL DEFAULT gen_random_uuid(),
    by_xid bigint   -- the transaction that wrote the row; NULL: the state was found to be restored
);
INSERT INTO incarnation DEFAULT VALUES;

-- This migration runs in one transaction or one subtransaction, whose id is the xmin of the row.  It
-- must not vouch for a dump of an older version that was restored just before: there, one
-- transaction has written the newest batches, and otherwise each has its own.
UPDATE incarnation SET by_xid = xmin::text::bigint
 WHERE (SELECT count(*) = count(DISTINCT writer_xid)
          FROM (SELECT xmin::text AS writer_xid FROM batch ORDER BY batch DESC LIMIT 2) newest);

CREATE FUNCTION incarnation_holds() RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (SELECT FROM incarnation WHERE by_xid = xmin::text::bigint)
$$;
REVOKE ALL ON FUNCTION incarnation_holds FROM PUBLIC;

-- Returns what every write of a registered relay compares with the value at its registration: the
-- timeline and the incarnation.  A restore under a running relay brings back the relay's own row, with
-- its id and its label, but not this.  xmin and not by_xid: a dump has by_xid, too.
CREATE FUNCTION server_fence() RETURNS bigint
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(server_timeline(), 0) << 32
           | coalesce((SELECT xmin::text::bigint FROM incarnation), 0)
$$;
REVOKE ALL ON FUNCTION server_fence FROM PUBLIC;

CREATE OR REPLACE FUNCTION history_changed() RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(timeline <> server_timeline(), false)
           OR coalesce(identity <> server_identity(), false)
           OR NOT incarnation_holds()
      FROM cursor
$$;

-- ---------------------------------------------------------------------- lane counters

-- A counter proves itself, too, because a dump of an older version and a restore of this table alone
-- leave the incarnation as it is: by_xid is the xmin of the row, written by every statement that
-- writes one.  No DEFAULT: a restore that does not contain the column would write it.
ALTER TABLE lane_counter ADD COLUMN by_xid bigint;
UPDATE lane_counter SET by_xid = (SELECT by_xid FROM incarnation);

CREATE OR REPLACE FUNCTION advance_lane_counter(lane bigint, old_seq bigint, new_seq bigint)
RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE lane_counter SET last_seq = new_seq, by_xid = pg_current_xact_id()::xid::text::bigint
     WHERE lane_id = lane AND last_seq = old_seq AND by_xid = xmin::text::bigint;
    IF FOUND THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM lane_counter
                   WHERE lane_id = lane AND by_xid IS DISTINCT FROM xmin::text::bigint) THEN
        RAISE EXCEPTION 'the counter of lane % was restored, or changed by hand', lane
              USING ERRCODE = 'OB002', HINT = 'The batch was not written; the relay begins new lanes.';
    END IF;
    RAISE EXCEPTION 'the last sequence number of lane % is not %', lane, old_seq
          USING HINT = 'The batch was not written; the relay reads the counters again.';
END $$;

-- ------------------------------------------------------------------------ privileges

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
                       ('relay', 'table', 'odometer', 'INSERT', NULL),
                       ('relay', 'table', 'odometer', 'UPDATE', NULL),
                       ('relay', 'table', 'odometer_mark', 'INSERT', NULL),
                       ('relay', 'table', 'odometer_mark', 'UPDATE', NULL),
                       ('relay', 'table', 'odometer_mark', 'DELETE', NULL),
                       ('relay', 'table', 'incarnation', 'INSERT', NULL),
                       ('relay', 'table', 'incarnation', 'UPDATE', NULL),
                       ('operator', 'sequence', 'replay_job_id_seq', 'UPDATE', NULL))
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
