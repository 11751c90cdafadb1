-- Compatible with programs of version 17.
--
-- A placeholder: another branch has this number.

SELECT 1;
