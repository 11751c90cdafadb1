-- Compatible with programs of version 16.
--
-- A placeholder: another branch has this number.

SELECT 1;
