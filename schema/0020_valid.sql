-- Compatible with programs of version 19.
--
-- Constraints of an empty outbox are valid: no older row contradicts them.  Programs that read the
-- schema of a database, such as SQLAlchemy, report a constraint that is NOT VALID.
DO $$
DECLARE
    name text;
BEGIN
    IF NOT EXISTS (SELECT FROM outbox) THEN
        FOR name IN
            SELECT conname FROM pg_constraint
             WHERE conrelid = 'outbox'::regclass AND contype = 'c' AND NOT convalidated
        LOOP
            EXECUTE format('ALTER TABLE outbox VALIDATE CONSTRAINT %I', name);
        END LOOP;
    END IF;
END $$;
