"""Quotas of tenants: what the plan of a change adds is counted before its message is sent.

Endpoints and lanes are counted by an ordinary read, because the message applies only under the
routing version of its plan: a concurrent addition makes it plan again.  Schedules have no such
version, so their message locks a row, and aborts if there are others than the plan has counted.

Lanes are counted twice.  Those of current generations are what the tenant has configured.  Those
of older generations stay until nothing refers to them (see `remove_lanes` of the schema), and so
do those of removed endpoints; the quota limits them as well, or a tenant could collect lanes by
changing their number.  Removed endpoints' lanes that had deliveries are left out: they are fewer
than those deliveries, and cost a relay nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import count
from outbox.errors import QuotaExceeded
from outbox.store.connection.row_security import stop_empty
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.store.sql.message import WriteCall

RESOURCES = ("endpoints", "lanes", "schedules", "once_keys")
"""What is limited: the columns of the table `quota`."""
ALL_TENANTS = ""
"""The tenant of the row for tenants without a row, or a value, of their own."""

# Lanes of an endpoint `e` that nothing is sent to any more; see the module.
OLDER_LANES = """(
    SELECT count(*) FROM lane l
     WHERE l.endpoint_id = e.id AND CASE e.state
           WHEN 'removed' THEN EXISTS (
                SELECT FROM lane_counter WHERE lane_id = l.id AND last_seq = 0)
           ELSE l.generation < e.generation END)"""

# The idempotency keys of a tenant `t`, as `tenancy.stored_key` of the API names them.
COUNTED_KEYS = """coalesce((
    SELECT keys FROM idempotency_key_count
     WHERE prefix = '@' || left(encode(sha256(convert_to(t.tenant, 'UTF8')), 'hex'), 32) || '/'),
    0)"""
_LIMITS = f"""
  JOIN quota every ON every.tenant = '{ALL_TENANTS}'
  LEFT JOIN quota own ON own.tenant = t.tenant"""

# Limits and use of some tenants.
READ_USE = f"""
SELECT t.tenant, {", ".join(f"coalesce(own.{r}, every.{r}) AS {r}_max" for r in RESOURCES)},
       used.*, (SELECT count(*) FROM schedule s WHERE s.tenant = t.tenant) AS schedules,
       {COUNTED_KEYS} AS once_keys
  FROM unnest($1::text[]) AS t(tenant) {_LIMITS}
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE e.state <> 'removed') AS endpoints,
              coalesce(sum(e.lanes) FILTER (WHERE e.state <> 'removed'), 0)::bigint AS lanes,
              coalesce(sum({OLDER_LANES}), 0)::bigint AS older_lanes
         FROM endpoint e WHERE e.tenant = t.tenant) used
"""  # noqa: S608 (constants only)

# The keys of a tenant and their quota, if that is used up and one of the keys $2 is new.
READ_KEYS_OVER = f"""
SELECT * FROM (
    SELECT {COUNTED_KEYS} AS keys, coalesce(own.once_keys, every.once_keys) AS keys_max
      FROM (SELECT $1::text AS tenant) t {_LIMITS}) counted
 WHERE keys >= keys_max AND EXISTS (
       SELECT FROM unnest($2::text[]) AS wanted(key)
        WHERE NOT EXISTS (SELECT FROM idempotency_key k WHERE k.key = wanted.key))
"""  # noqa: S608 (constants only)

# Endpoints as they are before a change.
READ_PLANNED = f"""
SELECT id, tenant, lanes, {OLDER_LANES} AS older_lanes FROM endpoint e WHERE id = ANY ($1)
"""  # noqa: S608 (a constant only)

# Schedules are added one after another, each message after that of the one before.
LOCK_QUOTA = WriteStatement(
    "lock_quota",
    f"SELECT FROM quota WHERE tenant = '{ALL_TENANTS}' FOR NO KEY UPDATE",
)
REQUIRE_SCHEDULES = WriteStatement(
    "require_schedules",
    "SELECT abort_unless($2 = (SELECT count(*) FROM schedule WHERE tenant = $1))",
)

NEXT_STEP = "or let an operator raise the quota: outbox quota set"


@dataclass(slots=True)
class Additions:
    """What a plan adds, changes and removes, as far as it is counted."""

    endpoints: dict[UUID, tuple[str | None, int] | None] = field(default_factory=dict)
    """Tenant and lanes of endpoints after the change; None: it is removed."""
    renewed: set[UUID] = field(default_factory=set)
    """Existing endpoints that get new lanes."""
    schedules: list[str] = field(default_factory=list)
    """The tenant of each new schedule."""

    async def require_quotas(self, connection: Any) -> list[WriteCall]:
        """Compare with the quotas of the tenants; returns what the message begins with.

        Raises:
            QuotaExceeded: a tenant would have more than its quota, and more than it has.
        """
        repaired = self.renewed - self.endpoints.keys()
        if not (repaired or self._tenants()):
            return []
        rows = await connection.fetch(READ_PLANNED, [*self.endpoints, *repaired])
        was = {row["id"]: row for row in rows}
        self.endpoints.update(
            {each: (was[each]["tenant"], was[each]["lanes"]) for each in repaired}
        )
        if not (tenants := self._tenants()):
            return []
        uses = {row["tenant"]: row for row in await connection.fetch(READ_USE, tenants)}
        if not uses:
            await stop_empty(connection, "quota")
        for tenant in tenants:
            self._require_lanes(tenant, uses[tenant], was)
        begins: list[WriteCall] = []
        for tenant, added in Counter(self.schedules).items():
            use = uses[tenant]
            _require(use, "schedules", added, "remove schedules")
            begins.append((REQUIRE_SCHEDULES, tenant, use["schedules"]))
        return [(LOCK_QUOTA,), *begins] if begins else []

    def _tenants(self) -> list[str]:
        of_endpoints = {planned[0] for planned in self.endpoints.values() if planned}
        return sorted({each for each in (*of_endpoints, *self.schedules) if each is not None})

    def _require_lanes(self, tenant: str, use: Any, was: dict[UUID, Any]) -> None:
        endpoints = lanes = older = 0
        gets_lanes = False
        for each, planned in self.endpoints.items():
            before = was.get(each)
            if before is not None and before["tenant"] == tenant:
                endpoints, lanes = endpoints - 1, lanes - before["lanes"]
                older -= before["older_lanes"]
            if planned is not None and planned[0] == tenant:
                endpoints, lanes = endpoints + 1, lanes + planned[1]
                renewed = each in self.renewed
                gets_lanes = gets_lanes or renewed or before is None
                if before is not None:
                    older += before["older_lanes"] + renewed * before["lanes"]
        _require(use, "endpoints", endpoints, "remove endpoints")
        _require(use, "lanes", lanes, "use fewer lanes")
        # The first change is always possible, as nothing of it can be removed before.
        kept, kept_max = use["older_lanes"] + older, use["lanes_max"]
        if gets_lanes and use["older_lanes"] and kept > kept_max:
            raise QuotaExceeded(
                f'tenant "{tenant}": {count(kept, "lane")} of older generations and removed '
                f"endpoints would remain, and the quota of lanes is {kept_max:,}; they go within "
                f"minutes, or with their last deliveries by retention: try again then, {NEXT_STEP}"
            )


def _require(use: Any, resource: str, added: int, remedy: str) -> None:
    """Require that a tenant stays within a quota, or goes down."""
    limit, needed = use[f"{resource}_max"], use[resource] + added
    if added > 0 and needed > limit:
        raise QuotaExceeded(
            f'tenant "{use["tenant"]}" has {use[resource]:,} {resource} and would have '
            f"{needed:,}, and its quota is {limit:,}; {remedy}, {NEXT_STEP}"
        )
