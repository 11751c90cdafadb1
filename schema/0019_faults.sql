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

-- What becomes of a lane whose broker has lost messages that it had acknowledged: it waits for a
-- person, or the relay appends them again from the log.
ALTER TABLE endpoint ADD COLUMN on_forgotten text NOT NULL DEFAULT 'hold'
    CHECK (on_forgotten IN ('hold', 'refill'));
