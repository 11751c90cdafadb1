-- Compatible with programs of version 18.
--
-- A placeholder: another branch has this number.

SELECT 1;
