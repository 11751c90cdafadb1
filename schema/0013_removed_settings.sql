-- Relays stop first.
--
-- Settings that endpoints do not have any more.  An older relay reads their columns.

ALTER TABLE endpoint DROP COLUMN checkpoint_every_s;
