-- Compatible with programs of version 14.
--
-- What an endpoint does with a delivery whose event is gone without a record.

-- An event whose type is not known, because it is gone, counts as an ordinary one: its dead letter,
-- or the stall of the lane that it holds, is reported like any other.
CREATE OR REPLACE FUNCTION contains_ordinary_event(
    lane bigint, from_batch bigint, first_seq bigint, last_seq bigint
) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM (
               SELECT outbox_id, copy_id FROM delivery
                WHERE lane_id = lane AND batch >= from_batch AND seq BETWEEN first_seq AND last_seq
                ORDER BY batch, seq OFFSET 0) d
         WHERE coalesce((SELECT type FROM outbox WHERE id = d.outbox_id),
                        (SELECT type FROM dead_letter WHERE id = d.copy_id), '')
               NOT LIKE 'outbox.%');
END $$;

ALTER TABLE endpoint ADD COLUMN on_missing text NOT NULL DEFAULT 'dead_letter'
    CHECK (on_missing IN ('dead_letter', 'hold'));
