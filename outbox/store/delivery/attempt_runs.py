"""The attempt log: the statements that write it alone, and its rows.

Successes of consecutive deliveries share a row of `attempt_run`, a *run*.  Their responses do as
well: a run whose responses have the same names has one document, in which a value that is not the
same for all is an array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.cluster.replicas import fence
from outbox.store.sql.expressions import RUN_DELIVERIES_MAX
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import (
    composite_array,
    composite_number,
    composite_numbers,
    composite_text,
    json_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.delivery.commands import AttemptRow, Record, Successes

RUN_STARTS_WITHIN_S = 1000.0
"""How long after the first attempt of a run another one starts at most: microseconds fit into an
integer."""
RUN_RESPONSE_CHARS_MAX = 16 << 10
"""Characters of the responses of a run that are not as its first one."""

_SUCCESS = 1, "delivered"
_OUTCOMES = {"delivered": "d", "retry": "r", "probe": "p", "refused": "f"}

# Whether a trigger or a rule of the application's may suppress attempts.
#   tgtype: 1 is FOR EACH ROW, 4 is INSERT, 2 is BEFORE, 64 is INSTEAD OF.  ev_type 3 is INSERT.
MAY_SUPPRESS_ATTEMPTS = """
WITH relation AS (SELECT 'attempt_run'::regclass AS oid UNION
                  SELECT relid FROM pg_partition_tree('attempt_run'))
SELECT EXISTS (SELECT FROM relation r JOIN pg_trigger t ON t.tgrelid = r.oid
                WHERE t.tgtype & 5 = 5 AND t.tgtype & 66 <> 0)
    OR EXISTS (SELECT FROM relation r JOIN pg_rewrite w ON w.ev_class = r.oid
                WHERE w.ev_type = '3')
"""

# The runs $2, if the CTE `fence` has a row.  $3: a JSON array of their distinct responses.  A
# document in each row would be parsed for each row, which takes longer than the rest of the row.
INSERT_ATTEMPTS = """
INSERT INTO attempt_run (lane_id, batch, seq, attempt, count, outcome, status, error, started_at,
                         elapsed_ms, starts_us, elapses_ms, response, replica_id)
SELECT a.lane_id, a.batch, a.seq, a.attempt, a.count, a.outcome, a.status, a.error,
       to_timestamp(a.started_us / float8 '1e6'), a.elapsed_ms, a.starts_us, a.elapses_ms,
       $3::jsonb -> a.response_index, $1::bigint
  FROM fence, unnest($2::attempt_run_row[]) AS a
"""

# Writes a group of acknowledgements: the successful attempts $2.
# A row for each run of them, unless this replica is fenced.
WRITE_ACKNOWLEDGEMENTS = WriteStatement(
    "write_acknowledgements", f"{fence('$4')} {INSERT_ATTEMPTS}"
)

# The same where a trigger may suppress an attempt: it fails unless $5 runs were written.  Counting
# takes an eighth to a quarter more of the server's time, so it is done only there.
# One row, unless this replica is fenced.
WRITE_COUNTED_ACKNOWLEDGEMENTS = WriteStatement(
    "write_counted_acknowledgements",
    f"""{fence("$4")},
logged AS ({INSERT_ATTEMPTS} RETURNING 1)
SELECT require_stored((SELECT count(*) FROM logged) = $5::bigint, 'attempt_run') FROM fence
""",  # noqa: S608 (constants only)
)


class _Run:
    """Attempts that share a row: one, or the successes of consecutive deliveries.

    Args:
        row: the first of them.
    """

    __slots__ = ("_first", "_lane_id", "_rows", "_varied_chars")

    def __init__(self, lane_id: int, row: AttemptRow) -> None:
        self._lane_id = lane_id
        self._first = row
        self._rows = [row]
        self._varied_chars = 0

    def accept_row(self, row: AttemptRow) -> bool:
        """Add the next attempt; returns False if it does not belong to this run."""
        first, rows = self._first, self._rows
        if (
            row[:6] != (first[0], first[1] + len(rows), *_SUCCESS, *first[4:6])
            or first[2:4] != _SUCCESS
            or not 0 <= row.started_at - first.started_at <= RUN_STARTS_WITHIN_S
            or len(rows) == RUN_DELIVERIES_MAX
        ):
            return False
        response = row.response
        if response is not first.response and response != first.response:
            if _names(response) != _names(first.response):
                return False
            self._varied_chars += len(json_text(response))
            if self._varied_chars > RUN_RESPONSE_CHARS_MAX:
                return False
        rows.append(row)
        return True

    def response(self) -> dict[str, Any] | None:
        """Their responses as one document."""
        responses = [row.response for row in self._rows if row.response is not None]
        return _merge(responses) if responses else None

    def literal(self, response_index: int | None) -> str:
        """The fields in the order of the type `attempt_run_row`."""
        first = self._first
        first_us = round(first.started_at * 1e6)
        starts_us = [round(row.started_at * 1e6) - first_us for row in self._rows]
        elapses_ms = [round(row.elapsed_s * 1e6) / 1e3 for row in self._rows]
        if starts_us.count(0) == elapses_ms.count(elapses_ms[0]) == len(starts_us):
            elapses_ms = elapses_ms[:1]  # One request.
        return (
            f"({self._lane_id},{first.batch},{first.seq},{first.attempt},{len(starts_us)},"
            f"{_OUTCOMES[first.outcome]},{composite_number(first.status)},"
            f"{composite_text(first.error)},{first_us},{elapses_ms[0]},"
            f"{composite_numbers(starts_us)},{composite_numbers(elapses_ms)},"
            f"{composite_number(response_index)})"
        )


def attempt_runs(
    successes: Sequence[tuple[int, Successes]], records: Sequence[Record]
) -> tuple[tuple[str, str], int]:
    """The arguments $2 and $3 of `INSERT_ATTEMPTS`, and the number of runs."""
    runs: list[_Run] = []
    last_runs: dict[int, _Run] = {}
    attempts = [(lane_id, row) for lane_id, each in successes for row in each.rows]
    attempts += [(each.lane_id, each.attempt) for each in records if each.attempt is not None]
    for lane_id, row in attempts:
        run = last_runs.get(lane_id)
        if run is None or not run.accept_row(row):
            run = last_runs[lane_id] = _Run(lane_id, row)
            runs.append(run)
    indexes: dict[str, int] = {}
    literals = []
    for run in runs:
        response = run.response()
        index = None if response is None else indexes.setdefault(json_text(response), len(indexes))
        literals.append(run.literal(index))
    return (composite_array(literals), f"[{','.join(indexes)}]"), len(runs)


def _names(response: Mapping[str, Any] | None) -> tuple[tuple[str, ...], ...] | None:
    return None if response is None else (tuple(response), tuple(response.get("headers", ())))


def _merge(responses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Documents with the same names as one; the values of a name that differ are an array."""
    merged: dict[str, Any] = {}
    for name, value in responses[0].items():
        values = [each[name] for each in responses]
        if isinstance(value, dict):
            merged[name] = _merge(values)
        else:
            merged[name] = value if values.count(value) == len(values) else values
    return merged
