-- Relays stop first.
--
-- A probe is told from an attempt of the delivery's own, and an endpoint may go without probes, and
-- without what its receiver responds.  A relay of an earlier version would do neither.

ALTER TABLE endpoint
    ADD COLUMN probes boolean NOT NULL DEFAULT true,
    ADD COLUMN keep_responses text NOT NULL DEFAULT 'all' CHECK (keep_responses IN ('none', 'failed', 'all'));

ALTER TABLE attempt_run
    DROP CONSTRAINT attempt_run_outcome_check,
    -- Delivered, retry, probe, refused.  A probe is a failure between the delivery's own attempts.
    ADD CONSTRAINT attempt_run_outcome_check CHECK (outcome IN ('d', 'r', 'p', 'f'));

-- As in 0024_runs.sql, with probes.
CREATE OR REPLACE VIEW attempt AS
    SELECT r.lane_id, r.batch, r.seq + u.n - 1 AS seq, r.attempt, r.replica_id,
           CASE r.outcome WHEN 'd' THEN 'delivered' WHEN 'r' THEN 'retry' WHEN 'p' THEN 'probe'
                          ELSE 'refused' END AS outcome,
           r.status, r.error, r.started_at + u.after_us * interval '1 microsecond' AS started_at,
           coalesce(r.elapses_ms[u.n], r.elapsed_ms) AS elapsed_ms,
           CASE WHEN r.count > 1 THEN response_of(r.response, u.n) ELSE r.response END AS response
      FROM attempt_run r
     CROSS JOIN LATERAL unnest(coalesce(r.starts_us, '{0}')) WITH ORDINALITY AS u(after_us, n);
