-- Compatible with programs of version 16.
--
-- Reserves the number for a migration of another branch.
SELECT;
