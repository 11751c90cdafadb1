"""SQL conditions: whether an event matches a subscription.

The sequencer matches in Python (`outbox.core.model.pattern`); queries about many stored events
use these.  `s` is the subscription, `o` the event.
"""

from __future__ import annotations

from outbox.core.model.pattern import PROBE

# A type pattern as a regular expression.  Operational events match only patterns that name
# them explicitly, and the doctor's probe only its full name.
TYPE_MATCHES = rf"""
    EXISTS (SELECT FROM unnest(s.types) AS p(pattern)
             WHERE o.type ~ ('^' || replace(replace(replace(replace(
                       p.pattern, '.', '\.'), '**', '#'), '*', '[^.]+'), '#', '.+') || '$')
               AND (o.type NOT LIKE 'outbox.%' OR p.pattern LIKE 'outbox.%')
               AND (o.type <> '{PROBE}' OR p.pattern = '{PROBE}'))
"""

TENANT_MATCHES = "(s.all_tenants OR s.tenant IS NOT DISTINCT FROM o.tenant)"

MATCHES = f"({TYPE_MATCHES} AND {TENANT_MATCHES})"

_COLUMNS = "endpoint_id, types, tenant, all_tenants, filter_stopped_at, filter_stopped_reason"
SUBSCRIBERS = f"""(
    SELECT {_COLUMNS} FROM subscription WHERE to_batch IS NULL
     UNION ALL
    SELECT {_COLUMNS} FROM feed WHERE ended_at IS NULL)"""  # noqa: S608 (constants only)
"""What endpoints get of new events: subscribers, and those that are fed earlier ones first."""

FILTER_MET = (
    "(s.filter IS NULL OR CASE WHEN o.payload IS NOT NULL "
    "THEN matches_filter(o.payload, s.filter) WHEN o.body IS NOT NULL THEN false END)"
)
"""Whether the payload matches; false also for one that is not JSON.  NULL: unknown, because the
filter cannot be evaluated (which the relay treats as a match), or the payload was erased."""


def matches_criteria(row: str, at: str, criteria: str = "s") -> str:
    """Whether criteria include the row of an event or a dead letter.

    Args:
        at: the column with the time to which `since` and `until` apply.
    """
    types = TYPE_MATCHES.replace("s.types", f"{criteria}.types").replace("o.type", f"{row}.type")
    return f"""
    ({criteria}.types IS NULL OR {types})
    AND ({criteria}.tenant IS NULL OR {row}.tenant = {criteria}.tenant)
    AND ({criteria}.since IS NULL OR {row}.{at} >= {criteria}.since)
    AND ({criteria}.until IS NULL OR {row}.{at} < {criteria}.until)
"""
