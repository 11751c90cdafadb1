"""Whether an event is for a subscription, asked of the database.

The sequencer matches in Python (`outbox.core.model.pattern`), before it writes anything;
who looks back at many events asks here.  A subscription is `s`, an event `o`.
"""

from __future__ import annotations

from outbox.core.model.pattern import PROBE

# A pattern as a regular expression.  Operational events are only for those who name them,
# and the doctor's probe for those who name all of it.
TYPE_MATCHES = rf"""
    EXISTS (SELECT FROM unnest(s.types) AS p(pattern)
             WHERE o.type ~ ('^' || replace(replace(replace(replace(
                       p.pattern, '.', '\.'), '**', '#'), '*', '[^.]+'), '#', '.+') || '$')
               AND (o.type NOT LIKE 'outbox.%' OR p.pattern LIKE 'outbox.%')
               AND (o.type <> '{PROBE}' OR p.pattern = '{PROBE}'))
"""

TENANT_MATCHES = "(s.all_tenants OR s.tenant IS NOT DISTINCT FROM o.tenant)"

MATCHES = f"({TYPE_MATCHES} AND {TENANT_MATCHES})"

FILTER_MET = (
    "(s.filter IS NULL OR CASE WHEN o.payload IS NOT NULL THEN meets(o.payload, s.filter) END)"
)
"""NULL: it cannot be told, because the filter cannot be evaluated, which the relay takes
for met, or because the payload was erased."""
