"""Journal of altered secrets: stored secrets that fail the check of their integrity.

An entry stays open until the endpoint is changed: the operator sets the secret again, and a
relay that still finds it altered then journals it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Connection

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.store.connection.store_connection import StoreConnection

KIND = "secret_altered"

# The newest entry of an endpoint `e` that opens or closes an alarm.
_NEWEST = f"""
SELECT j.kind, j.at, j.data FROM journal j
 WHERE j.endpoint_id = e.id
   AND j.kind IN ('{KIND}', 'endpoint_updated', 'endpoint_secret_rotated',
                  'endpoint_certificate_set', 'endpoint_certificate_removed')
 ORDER BY j.id DESC LIMIT 1
"""  # noqa: S608 (a constant only)

# Journals endpoints that have no open entry, unless an operator has changed something since the
# routing version $4: their secrets may be set again by now.  The lock orders the entry before such
# a change.
JOURNAL_ALTERED_SECRETS = WriteStatement(
    "journal_altered_secrets",
    f"""
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT '{KIND}', $3, e.id, jsonb_build_object('reason', altered.reason)
  FROM unnest($1::uuid[], $2::text[]) AS altered(id, reason)
  JOIN endpoint e ON e.id = altered.id
  JOIN (SELECT version FROM cursor FOR SHARE) AS cursor ON cursor.version = $4
  LEFT JOIN LATERAL ({_NEWEST}) AS newest ON true
 WHERE newest.kind IS DISTINCT FROM '{KIND}'
""",  # noqa: S608 (constants only)
    repeatable=True,
)

READ_ALTERED_SECRETS = f"""
SELECT e.name, newest.at, newest.data ->> 'reason' AS reason
  FROM endpoint e CROSS JOIN LATERAL ({_NEWEST}) AS newest
 WHERE e.state <> 'removed' AND newest.kind = '{KIND}'
 ORDER BY e.name COLLATE "C"
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class AlteredSecretRow:
    """An open journal entry."""

    name: str
    """The endpoint."""
    at: datetime
    reason: str


async def journal_altered_secrets(
    connection: StoreConnection, endpoints: Sequence[Endpoint], actor: str, version: int
) -> None:
    """Journal endpoints with an altered secret; asyncpg's errors propagate.

    Args:
        version: the routing version before the endpoints were read; nothing is journalled if it
            has changed.
    """
    ids, reasons = [e.id for e in endpoints], [e.problem for e in endpoints]
    await connection.write(JOURNAL_ALTERED_SECRETS, ids, reasons, actor, version)


async def read_altered_secrets(connection: Connection[Any]) -> list[AlteredSecretRow]:
    """The open journal entries, by endpoint name."""
    return [AlteredSecretRow(**row) for row in await connection.fetch(READ_ALTERED_SECRETS)]
