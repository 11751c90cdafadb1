"""The attempt log: statements that write it alone, and its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.cluster.replicas import fence
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import (
    composite_array,
    composite_number,
    composite_text,
    distinct_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import Record, RunResults

# The rows $2, each with the index $3 of its response in $4, a JSON array of the distinct ones.  A
# document in each row would be parsed for each row, which takes longer than the rest of the row.
# (Older relays send it there, so `attempt_row` keeps the field.)
_ATTEMPTS = """
       (SELECT lane_id, batch, seq, attempt, outcome, status, error,
               to_timestamp(started_us / float8 '1e6') AS started_at,
               elapsed_us / real '1000' AS elapsed_ms, $4::jsonb -> response_index AS response
          FROM unnest($2::attempt_row[], $3::integer[])
               AS r(lane_id, batch, seq, attempt, outcome, status, error, started_us, elapsed_us,
                    unused, response_index)) AS a
"""

# Whether a trigger or a rule of the application's may suppress attempts.
#   tgtype: 1 is FOR EACH ROW, 4 is INSERT, 2 is BEFORE, 64 is INSTEAD OF.  ev_type 3 is INSERT.
MAY_SUPPRESS_ATTEMPTS = """
WITH relation AS (SELECT 'attempt'::regclass AS oid UNION
                  SELECT relid FROM pg_partition_tree('attempt'))
SELECT EXISTS (SELECT FROM relation r JOIN pg_trigger t ON t.tgrelid = r.oid
                WHERE t.tgtype & 5 = 5 AND t.tgtype & 66 <> 0)
    OR EXISTS (SELECT FROM relation r JOIN pg_rewrite w ON w.ev_class = r.oid
                WHERE w.ev_type = '3')
"""

# The attempts $2 to $4, if the CTE `fence` has a row.
INSERT_ATTEMPTS = f"""
INSERT INTO attempt (lane_id, batch, seq, attempt, outcome, status, error, started_at,
                     elapsed_ms, response, replica_id)
SELECT a.*, $1::bigint FROM fence, {_ATTEMPTS}
"""  # noqa: S608 (constants only)

# Writes a group of acknowledgements: the successful attempts $2 to $4.
# A row for each of them, unless this replica is fenced.
WRITE_ACKNOWLEDGEMENTS = WriteStatement(
    "write_acknowledgements", f"{fence('$5')} {INSERT_ATTEMPTS}"
)

# The same where a trigger may suppress an attempt: it fails unless $6 were written.  Counting
# takes an eighth to a quarter more of the server's time, so it is done only there.
# One row, unless this replica is fenced.
WRITE_COUNTED_ACKNOWLEDGEMENTS = WriteStatement(
    "write_counted_acknowledgements",
    f"""{fence("$5")},
logged AS ({INSERT_ATTEMPTS} RETURNING 1)
SELECT require_stored((SELECT count(*) FROM logged) = $6::bigint, 'attempt') FROM fence
""",  # noqa: S608 (constants only)
)


def attempt_rows(
    runs: Sequence[tuple[int, RunResults]], records: Sequence[Record]
) -> tuple[str, str, str]:
    """The arguments $2 to $4 of `INSERT_ATTEMPTS`."""
    rows: list[str] = []
    responses: list[dict[str, Any] | None] = []
    for lane_id, run in runs:
        error = composite_text(run.error)
        columns = run.batches, run.seqs, run.statuses, run.started_at, run.elapsed_s
        rows += [
            _attempt_row(lane_id, batch, seq, 1, "delivered", status, error, at, elapsed_s)
            for batch, seq, status, at, elapsed_s in zip(*columns, strict=True)
        ]
        responses += run.responses
    for record in records:
        if (row := record.attempt) is not None:
            batch, seq, attempt, outcome, status, cause, at, took_s, response = row
            lane_id, cause = record.lane_id, composite_text(cause)
            rows.append(
                _attempt_row(lane_id, batch, seq, attempt, outcome, status, cause, at, took_s)
            )
            responses.append(response)
    return composite_array(rows), *distinct_json(responses)


def _attempt_row(
    lane_id: int,
    batch: int,
    seq: int,
    attempt: int,
    outcome: str,
    status: int | None,
    error: str,
    started_at: float,
    elapsed_s: float,
) -> str:
    """The fields in the order of the type `attempt_row`, without the response.

    Args:
        error: encoded.
    """
    return (
        f"({lane_id},{batch},{seq},{attempt},{outcome},{composite_number(status)},"
        f"{error},{round(started_at * 1e6)},{round(elapsed_s * 1e6)},)"
    )
