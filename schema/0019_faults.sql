-- Compatible with programs of version 18.
--
-- Faults that end without a person: tables of applications beside the outbox, and brokers that
-- have lost what they had acknowledged.

-- As in 0014_absence.sql; a partition has the generated columns of its parent, too, or PostgreSQL
-- does not attach it.
CREATE OR REPLACE FUNCTION make_partition(
    parent regclass, number bigint, width bigint DEFAULT 100000000000
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    child text := (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS '
                   'INCLUDING GENERATED)', child, parent);
    IF parent = 'outbox'::regclass THEN
        EXECUTE format('CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON %I '
                       'FOR EACH STATEMENT EXECUTE FUNCTION refuse_removal()', child);
        EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_truncate', child);
    END IF;
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                   parent, child, number * width, (number + 1) * width);
END $$;

-- As in 0014_absence.sql; a time more than an hour ahead, which a clock wrote that was set back, does
-- not count.
CREATE OR REPLACE FUNCTION empty_partition(parent regclass, number bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT SET lock_timeout = '100ms' SET row_security = off AS $$
DECLARE
    period_kind text := CASE parent WHEN 'outbox'::regclass THEN 'events' ELSE 'log' END;
    child regclass := to_regclass(quote_ident(
        (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number));
    setting text := regexp_replace(current_schema(), '^[0-9]|[^A-Za-z0-9_]', '_', 'g') || '.remove';
    before text := coalesce(current_setting(setting, true), '');
BEGIN
    IF parent <> ALL ('{outbox,batch,delivery,attempt}'::regclass[]) OR child IS NULL
       OR NOT EXISTS (SELECT FROM period p
                       WHERE p.kind = period_kind AND p.number = empty_partition.number
                         AND p.dropped_at NOT BETWEEN clock_timestamp() - interval '1 hour'
                                                  AND clock_timestamp() + interval '1 hour'
                         AND (child::oid = ANY (p.detaching)
                              OR EXISTS (SELECT FROM pg_inherits i
                                          WHERE i.inhrelid = child AND i.inhparent = parent))) THEN
        RAISE EXCEPTION 'partition % of % does not belong to a period that was dropped at least an hour ago',
            number, parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_relation_size(child) = 0 THEN
        RETURN false;
    END IF;
    PERFORM set_config(setting, 'on', true);
    EXECUTE format('TRUNCATE ONLY %s', child);
    PERFORM set_config(setting, before, true);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- What becomes of a lane whose broker has lost messages that it had acknowledged: it waits for a
-- person, or the relay appends them again from the log.
ALTER TABLE endpoint ADD COLUMN on_forgotten text NOT NULL DEFAULT 'hold'
    CHECK (on_forgotten IN ('hold', 'refill'));
