-- Compatible with programs of version 16.
--
-- Observed time: what ends something after a while (an endpoint without a success, the age of a
-- delivery or of a backlog, retention) counts only time in which a relay ran.  Otherwise a relay
-- that was off, a restored dump or a step of the clock would end it before anybody had tried.

-- Seconds in which a relay held a lease, and the replica that adds to them in its renewals.  A
-- relay of an older version never adds.
CREATE TABLE odometer (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    seconds float8  NOT NULL DEFAULT 0,
    adder   bigint, -- no reference: it remains after its replica has ended
    -- The reading when this state was restored: nobody could look at it before.
    began_s float8  NOT NULL DEFAULT 0
);
INSERT INTO odometer DEFAULT VALUES;

-- Readings of the odometer with the database's time: what has a stored time needs no reading of its
-- own.  At most one per minute and adder; maintenance thins them.
CREATE TABLE odometer_mark (
    seconds float8      PRIMARY KEY,
    at      timestamptz NOT NULL
);
-- Times before it count from here.
INSERT INTO odometer_mark VALUES (0, clock_timestamp());

-- The time before which a stored time has been observed for so many seconds: the same lookup as
-- `Odometer.since` in outbox/core/cluster/observed_time.py, for statements that compare many rows.
-- A mark counts only if no later one has an earlier time, because the clock was set back.
CREATE FUNCTION observed_before(seconds float8) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN observed_before.seconds <= 0 THEN 'infinity' ELSE coalesce((
        SELECT least(m.at + make_interval(secs => o.seconds - observed_before.seconds - m.seconds),
                     (SELECT min(later.at) FROM odometer_mark later WHERE later.seconds > m.seconds))
          FROM odometer o JOIN odometer_mark m ON m.seconds <= o.seconds - observed_before.seconds
         WHERE NOT EXISTS (SELECT FROM odometer_mark later
                            WHERE later.seconds > m.seconds AND later.at <= m.at)
         ORDER BY m.seconds DESC LIMIT 1), '-infinity') END
$$;
REVOKE ALL ON FUNCTION observed_before FROM PUBLIC;
