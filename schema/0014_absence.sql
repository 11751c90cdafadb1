-- Relays stop first.

-- ---------------------------------------------------------- absence is proven

-- The tables of a dropped period that maintenance has begun to detach.  A table of that name that
-- somebody else has detached may have events that were never read: it is not dropped.
ALTER TABLE period ADD COLUMN detaching oid[] NOT NULL DEFAULT '{}';

-- A new reason: 'missing', an event that is gone although nothing erased it.
ALTER TABLE dead_letter DROP CONSTRAINT dead_letter_reason_check;
ALTER TABLE dead_letter ADD CONSTRAINT dead_letter_reason_check
    CHECK (reason IN ('refused', 'exhausted', 'expired', 'erased', 'missing', 'skipped', 'backlog',
                      'adopted', 'disabled', 'removed'));

-- Dead letters of older versions whose reason 'erased' may be wrong; maintenance classifies them.
CREATE INDEX dead_letter_unclassified ON dead_letter (id)
 WHERE reason = 'erased' AND erased_at IS NULL AND outbox_id IS NOT NULL;

-- ------------------------------------------------------------------ accounting

-- A count of the events that does not depend on what the relay concluded.  In every block of ids up
-- to the cursor's position, the number of rows is the number of ids without the dead ones.  Ids of
-- open gaps are left out of both sides, because rows of them may be committed and not sequenced.
-- Block n of a period has 2^20 ids, from number × 10^11 + n × 2^20; a block ends with its period.
--
-- Dead ids are counted per block, because their batches are dropped before the events.
CREATE TABLE event_account (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    batch    bigint NOT NULL DEFAULT 0,  -- dead ids of all batches up to this one are counted
    first_id bigint NOT NULL DEFAULT 0   -- lowest accounted id
);

CREATE TABLE event_block (
    period    bigint NOT NULL,
    block     bigint NOT NULL,
    dead      bigint NOT NULL DEFAULT 0, -- counted dead ids, and what the owner accepts as gone
    present   bigint,                    -- the last count: rows, by the index,
    expected  bigint,                    -- and as many as there should be
    examined_at timestamptz,
    PRIMARY KEY (period, block)
);
CREATE INDEX event_block_difference ON event_block (examined_at) WHERE present <> expected;

-- Dead ranges of more than 2^30 ids, each in one period: the unused rest of a period, or what a
-- setval() skipped.  They are not counted in blocks.
CREATE TABLE event_void (ids int8range PRIMARY KEY);

-- Dead ids of a log that was dropped before this migration are not known.
INSERT INTO event_account (first_id)
    SELECT CASE number WHEN 0 THEN 0 ELSE high + 1 END
      FROM period WHERE kind = 'log' AND dropped_at IS NULL ORDER BY number LIMIT 1;

CREATE FUNCTION block_ids(period bigint, block bigint) RETURNS int8range
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT int8range(period * 100000000000 + (block << 20),
                     least(period * 100000000000 + ((block + 1) << 20),
                           (period + 1) * 100000000000))
$$;

-- The parts of a range by block.
CREATE FUNCTION split_into_blocks(ids int8range)
RETURNS TABLE (period bigint, block bigint, part int8range)
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT n.period, b.block, ids * block_ids(n.period, b.block)
      FROM generate_series(lower(ids) / 100000000000,
                           (upper(ids) - 1) / 100000000000) AS n(period),
           LATERAL generate_series(
               greatest(lower(ids) - n.period * 100000000000, 0) >> 20,
               (least(upper(ids) - n.period * 100000000000, 100000000000) - 1) >> 20) AS b(block)
$$;

-- Ids in open gaps.  (This and the functions below read by indexes, also for `outbox verify`, which
-- turns that off for its own query.)
CREATE FUNCTION open_ids() RETURNS int8multirange
LANGUAGE sql STABLE
SET search_path FROM CURRENT SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    SELECT coalesce((SELECT young FROM batch ORDER BY batch DESC LIMIT 1), '{}')
           + coalesce((SELECT range_agg(int8range(lo, hi, '[]')) FROM gap), '{}')
$$;

-- Counts dead ids.
CREATE FUNCTION count_dead_ids(ids int8multirange) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    WITH dead AS MATERIALIZED (
        SELECT d.part * int8range(n.period * 100000000000, (n.period + 1) * 100000000000) AS part
          FROM event_account a,
               unnest(ids * int8multirange(int8range(a.first_id, NULL))) AS d(part),
               generate_series(lower(d.part) / 100000000000,
                               (upper(d.part) - 1) / 100000000000) AS n(period)
         WHERE NOT EXISTS (SELECT FROM period p
                            WHERE p.kind = 'events' AND p.number = n.period
                              AND p.dropped_at IS NOT NULL)),
    voids AS (
        INSERT INTO event_void (ids)
        SELECT part FROM dead WHERE upper(part) - lower(part) > 1 << 30)
    INSERT INTO event_block AS e (period, block, dead)
    SELECT s.period, s.block, sum(upper(s.part) - lower(s.part))
      FROM dead, split_into_blocks(dead.part) s
     WHERE upper(dead.part) - lower(dead.part) <= 1 << 30
     GROUP BY s.period, s.block
    ON CONFLICT (period, block) DO UPDATE SET dead = e.dead + excluded.dead
$$;

-- The opposite, for ids of which events exist (`outbox resequence`).
CREATE FUNCTION discount_dead_ids(ids int8multirange) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    WITH cut AS MATERIALIZED (
        SELECT v.ids FROM event_void v WHERE v.ids && discount_dead_ids.ids),
    removed AS (
        DELETE FROM event_void v USING cut WHERE v.ids = cut.ids),
    rest AS (
        INSERT INTO event_void (ids)
        SELECT r.part
          FROM cut, unnest(int8multirange(cut.ids) - discount_dead_ids.ids) AS r(part)),
    counted AS (
        SELECT s.period, s.block, sum(upper(s.part) - lower(s.part)) AS dead
          FROM event_account a,
               unnest(discount_dead_ids.ids * int8multirange(int8range(a.first_id, NULL))
                      - coalesce((SELECT range_agg(cut.ids) FROM cut), '{}')) AS d(part),
               split_into_blocks(d.part) s
         GROUP BY s.period, s.block)
    UPDATE event_block e SET dead = e.dead - counted.dead
      FROM counted WHERE e.period = counted.period AND e.block = counted.block
$$;

-- Counts the dead ids of the next batches that have some, in the order of batches, which is that of
-- their commits; returns whether there may be more.
CREATE FUNCTION account_batches(batches_max integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    counted bigint := (SELECT a.batch FROM event_account a FOR UPDATE);
    reached bigint;
    dead_ids int8multirange;
    is_full boolean;
BEGIN
    WITH due AS MATERIALIZED (
        SELECT b.batch, b.dead FROM batch b
         WHERE b.batch > counted AND NOT isempty(b.dead) ORDER BY b.batch LIMIT batches_max)
    SELECT CASE count(*) WHEN batches_max THEN max(due.batch)
                ELSE (SELECT max(b.batch) FROM batch b) END,
           (SELECT range_agg(d.part) FROM due, unnest(due.dead) AS d(part)),
           count(*) = batches_max
      INTO reached, dead_ids, is_full FROM due;
    IF dead_ids IS NOT NULL THEN
        PERFORM count_dead_ids(dead_ids);
    END IF;
    UPDATE event_account a SET batch = reached WHERE a.batch < reached;
    RETURN is_full;
END $$;

-- Ids up to the cursor's position, of periods that are not dropped.
CREATE FUNCTION accounted_ids() RETURNS int8range
LANGUAGE sql STABLE
SET search_path FROM CURRENT SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    SELECT int8range(bounds.lo, greatest(bounds.lo, bounds.high + 1))
      FROM (SELECT greatest(a.first_id, (SELECT min(number) * 100000000000 FROM period
                                          WHERE kind = 'events' AND dropped_at IS NULL)) AS lo,
                   (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) AS high
              FROM event_account a) bounds
$$;

-- The number of events that should exist per block, as far as it has some of these ids.
CREATE FUNCTION expected_events(of_ids int8range)
RETURNS TABLE (period bigint, block bigint, expected bigint)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    WITH usable AS MATERIALIZED (
        SELECT int8multirange(of_ids * accounted_ids() * int8range(1, NULL)) - open_ids()
               - coalesce((SELECT range_agg(v.ids) FROM event_void v), '{}')
               - coalesce((SELECT range_agg(d.part)
                             FROM event_account a, batch b, unnest(b.dead) AS d(part)
                            WHERE b.batch > a.batch AND NOT isempty(b.dead)), '{}') AS ids),
    assigned AS (
        SELECT s.period, s.block, sum(upper(s.part) - lower(s.part))::bigint AS ids
          FROM usable, unnest(usable.ids) AS u(part), split_into_blocks(u.part) s
         GROUP BY s.period, s.block)
    SELECT period, block, coalesce(a.ids, 0) - coalesce(e.dead, 0)
      FROM assigned a
      FULL JOIN (SELECT e.period, e.block, e.dead FROM event_block e
                  WHERE block_ids(e.period, e.block) && of_ids) e USING (period, block)
$$;

-- Expected events of a block, and those that are there by the index, by which the relay reads, too.
-- No row: its period was dropped, or it has no id yet.  STABLE: all of it is one snapshot.  Without
-- JIT, which the cost of disabled scans would trigger.
CREATE FUNCTION account(of_period bigint, of_block bigint)
RETURNS TABLE (expected bigint, present bigint)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_indexscan = on SET enable_indexonlyscan = on AS $$
    SELECT coalesce(e.expected, 0), p.present
      FROM (SELECT block_ids(of_period, of_block) * accounted_ids() AS ids OFFSET 0) b
     CROSS JOIN LATERAL (
           SELECT count(o.id) AS present
             FROM unnest(int8multirange(b.ids) - open_ids()) AS searched(part)
            CROSS JOIN LATERAL (
                  SELECT id FROM outbox
                   WHERE id >= lower(searched.part) AND id < upper(searched.part) OFFSET 0) o) p
      LEFT JOIN expected_events(b.ids) e ON true
     WHERE NOT isempty(b.ids)
$$;

-- Counts a block, and journals a difference that is not recorded yet.  A difference
-- counts if a second count, with a later snapshot, repeats it.
CREATE FUNCTION examine_block(of_period bigint, of_block bigint, actor text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    counted record;
    difference bigint;
    recorded bigint;
BEGIN
    SELECT a.expected, a.present INTO counted FROM account(of_period, of_block) a;
    difference := counted.present - counted.expected;
    IF difference <> 0 THEN
        SELECT a.expected, a.present INTO counted FROM account(of_period, of_block) a;
    END IF;
    -- Excludes that the block is dropped meanwhile.
    PERFORM FROM event_account FOR UPDATE;
    IF counted.present - counted.expected IS DISTINCT FROM difference OR difference IS NULL
       OR isempty(block_ids(of_period, of_block) * accounted_ids()) THEN
        RETURN;
    END IF;
    recorded := (SELECT e.present - e.expected FROM event_block e
                  WHERE e.period = of_period AND e.block = of_block);
    INSERT INTO event_block AS e (period, block, present, expected, examined_at)
    VALUES (of_period, of_block, counted.present, counted.expected, clock_timestamp())
    ON CONFLICT (period, block) DO UPDATE
       SET present = excluded.present, expected = excluded.expected,
           examined_at = excluded.examined_at;
    IF difference <> 0 AND recorded IS DISTINCT FROM difference THEN
        INSERT INTO journal (kind, actor, data)
        SELECT 'events_unaccounted', examine_block.actor,
               jsonb_build_object('first_id', lower(b.ids), 'last_id', upper(b.ids) - 1,
                                  'events', counted.present, 'expected', counted.expected)
          FROM block_ids(of_period, of_block) AS b(ids);
    END IF;
END $$;

-- The blocks to examine next: the last one, then those never examined, then the longest ago.
-- A block of nothing but dead ids only if it has an event.
CREATE FUNCTION blocks_to_examine(blocks_max integer) RETURNS TABLE (period bigint, block bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    WITH assigned AS MATERIALIZED (
        SELECT x.period, x.block FROM expected_events('(,)') x
        UNION
        SELECT o.id / 100000000000, (o.id % 100000000000) >> 20
          FROM event_void v
         CROSS JOIN LATERAL (SELECT id FROM outbox WHERE id >= lower(v.ids) AND id < upper(v.ids)
                              ORDER BY id LIMIT 1) o)
    SELECT a.period, a.block FROM assigned a LEFT JOIN event_block e USING (period, block)
     ORDER BY (a.period, a.block) = (SELECT m.period, m.block FROM assigned m
                                      ORDER BY m.period DESC, m.block DESC LIMIT 1) DESC,
              e.examined_at NULLS FIRST, a.period, a.block
     LIMIT blocks_max
$$;

-- For exporters, without the relay's role and code: the oldest committed event that is not
-- sequenced, which is above the cursor's position or in an open gap, or has an id that the sequence
-- does not assign.  One row always; age 0: there is none.  A function, because a view would read
-- less under row level security.
CREATE FUNCTION unsequenced_events()
RETURNS TABLE (age_s double precision, created_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT coalesce(greatest(extract(epoch FROM clock_timestamp() - min(o.created_at)), 0), 0)
               ::double precision,
           min(o.created_at)
      FROM unnest(open_ids() + int8multirange(
               int8range(NULL, 1),
               int8range(coalesce((SELECT high FROM batch ORDER BY batch DESC LIMIT 1), 0) + 1,
                         NULL))) AS unsequenced(part)
     CROSS JOIN LATERAL (
           SELECT created_at FROM outbox
            WHERE id >= coalesce(lower(unsequenced.part), 0)
              AND id < coalesce(upper(unsequenced.part), 9223372036854775807)
            ORDER BY id LIMIT 1) o
$$;

-- As in 0007_roles.sql, with the accounts: the dead ids of a log are counted before it is dropped,
-- and blocks are dropped with their events.
CREATE OR REPLACE FUNCTION drop_period(kind text, number bigint)
RETURNS TABLE (began_at timestamptz, ended_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    final_batch bigint;
BEGIN
    PERFORM FROM cursor FOR UPDATE;
    SELECT CASE p.kind WHEN 'events' THEN p.last_batch
                ELSE (p.number + 1) * 100000000000 - 1 END INTO final_batch
      FROM period p
     WHERE p.kind = drop_period.kind AND p.number = drop_period.number
       AND p.ended_at IS NOT NULL AND p.dropped_at IS NULL
       AND NOT EXISTS (SELECT FROM period older
                        WHERE older.kind = p.kind AND older.number < p.number
                          AND older.dropped_at IS NULL);
    IF final_batch IS NULL
       OR drop_period.kind = 'log'
          AND final_batch >= coalesce((SELECT a.batch FROM event_account a), 0)
       OR EXISTS (
           SELECT FROM lane_progress l JOIN lane_counter c ON c.lane_id = l.lane_id
            WHERE c.last_seq > l.acked_seq AND l.floor_batch <= final_batch) THEN
        RETURN;
    END IF;
    RETURN QUERY
        UPDATE period p SET dropped_at = clock_timestamp()
         WHERE p.kind = drop_period.kind AND p.number = drop_period.number
        RETURNING p.began_at, p.ended_at;
    IF drop_period.kind = 'events' THEN
        PERFORM FROM event_account FOR UPDATE;
        DELETE FROM event_block e WHERE e.period = drop_period.number;
        DELETE FROM event_void v WHERE lower(v.ids) / 100000000000 = drop_period.number;
    END IF;
END $$;

-- As in 0012_adoption.sql, with the privileges that were added since.
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
    RETURN QUERY
        SELECT a.kind, a.name, a.privilege, NULL::text[]
          FROM (VALUES ('table', 'event_account', 'SELECT'),
                       ('table', 'event_block', 'SELECT'),
                       ('table', 'event_void', 'SELECT'),
                       ('function', 'account', 'EXECUTE'),
                       ('function', 'accounted_ids', 'EXECUTE'),
                       ('function', 'block_ids', 'EXECUTE'),
                       ('function', 'expected_events', 'EXECUTE'),
                       ('function', 'open_ids', 'EXECUTE'),
                       ('function', 'unsequenced_events', 'EXECUTE'))
               AS a(kind, name, privilege)
         WHERE purpose IN ('reader', 'operator', 'relay');
    RETURN QUERY
        SELECT 'function', f.name, 'EXECUTE', NULL::text[]
          FROM unnest('{account_batches,blocks_to_examine,examine_block}'::text[]) AS f(name)
         WHERE purpose = 'relay';
END $$;

-- Functions with the owner's privileges read all rows, or fail: a policy with FORCE ROW LEVEL
-- SECURITY applies to the owner, too, and an absent row would be taken for one that was never
-- written.  Last, because CREATE OR REPLACE FUNCTION removes a setting that it does not repeat.
DO $$
DECLARE
    definer regprocedure;
BEGIN
    FOR definer IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.prosecdef
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET row_security = off', definer);
    END LOOP;
END $$;
