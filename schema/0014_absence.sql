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
