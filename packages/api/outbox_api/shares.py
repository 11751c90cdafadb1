"""Shares of tenants: whether what a tenant's token publishes passes at once, or is held.

Fairness comes before an event has its id, because a batch is a prefix of the ids: what is once in
the outbox is sequenced in the order of the ids, whatever it delays.  So this is admission control,
with token buckets whose tokens are deliveries:

    a bucket of the tenant covers the request      5,000 deliveries/s, 20,000 at once
    and one of all tenants together does           20,000/s and at once
    and nothing of the tenant is held              the database decides, see `publish_shared`
                                                   in schema/0022_shares.sql

Otherwise the whole request is held: the database stores its events with their costs, and a relay
publishes them in their order, 5,000 deliveries/s for each tenant.  The buckets are those of one
process; what is held is paced by one relay.

The cost of an event is the number of endpoints whose types match, of its tenant and of all tenants,
and at least one: the relay sequences it in any case.
Filters are not evaluated.  It is computed from routes as of a routing version.  If another one is
current, the database publishes nothing and returns it, and the routes are read again.  The order of
events does not depend on their costs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model.pattern import Patterns
from outbox.core.sequencing.tenant_pace import PER_S
from outbox_api.token_bucket import Allowance, TokenBuckets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHARE = Allowance(per_s=PER_S, burst=20_000)
"""Deliveries of a tenant that are published at once; a relay moves held ones at the same rate."""
TOGETHER = Allowance(per_s=20_000, burst=20_000)
"""Those of all tenants: the sum of their bursts would delay all events, with ten tenants for
seconds."""
BUCKETS_MAX = 10_000
"""Tenants whose buckets are not full.  The least recently charged one of more than these is full
again."""
TENANT_SEGMENTS_MAX = 20_000
"""Segments of the patterns of a tenant: each may be a node of the trie, of some 350 bytes."""
SEGMENTS_MAX = 100_000
"""Segments of all tenants' patterns that are kept."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The subscriptions of a tenant alone, or those to all tenants, as of a routing version."""

    version: int
    endpoints: int
    segments: int
    patterns: Patterns | None
    """Those of all endpoints.  None if there are too many: then each endpoint counts for every
    type."""

    def count(self, type: str) -> int:  # noqa: A002
        """The number of endpoints that receive a type."""
        return self.endpoints if self.patterns is None else len(self.patterns.matching(type))


def build_routes(
    version: int, subscriptions: Iterable[Sequence[str]], *, segments_max: int | None = None
) -> Routes:
    """Build the routes of endpoints.

    Args:
        subscriptions: the patterns of each endpoint.
        segments_max: a limit above which the patterns are not kept; None: no limit.
    """
    each_types = list(subscriptions)
    segments = sum(pattern.count(".") + 1 for types in each_types for pattern in types)
    if segments_max is not None and segments > segments_max:
        return Routes(version, len(each_types), 1, None)
    patterns = Patterns()
    for n, types in enumerate(each_types):
        for pattern in types:
            patterns.add(pattern, n)
    return Routes(version, len(each_types), segments + 1, patterns)


class Shares:
    """The shares of all tenants in one process.

    Times are seconds of any monotonic clock.
    """

    def __init__(
        self,
        share: Allowance = SHARE,
        together: Allowance = TOGETHER,
        *,
        buckets_max: int = BUCKETS_MAX,
        segments_max: int = SEGMENTS_MAX,
    ) -> None:
        self._tenants = TokenBuckets(share, keys_max=buckets_max)
        self._together = TokenBuckets(together, keys_max=1)
        self._segments_max = segments_max
        self.version: int | None = None
        """The routing version of the routes, as far as it is known."""
        self._of_all: Routes | None = None
        # By tenant; the least recently used first.
        self._of_tenant: OrderedDict[str, Routes] = OrderedDict()
        self._segments = 0

    # ---------------------------------------------------------------- costs

    def lacks_routes(self, tenant: str) -> tuple[bool, bool]:
        """Whether routes have to be read: those of a tenant, and those of all tenants."""
        return not self._is_current(self._of_tenant.get(tenant)), not self._is_current(self._of_all)

    def set_routes(self, tenant: str, own: Routes | None, of_all: Routes | None) -> None:
        """Keep routes that were read; None: they were not."""
        if of_all is not None:
            self.version, self._of_all = of_all.version, of_all
        if own is not None:
            self.version = own.version
            self._forget(tenant)
            self._of_tenant[tenant] = own
            self._segments += own.segments
            while self._segments > self._segments_max and len(self._of_tenant) > 1:
                self._forget(next(iter(self._of_tenant)))

    def costs(self, tenant: str, types: Sequence[str]) -> list[int]:
        """The number of deliveries of each event, whose type is valid."""
        own, of_all = self._of_tenant[tenant], self._of_all
        self._of_tenant.move_to_end(tenant)
        by_type = {
            each: max(own.count(each) + (0 if of_all is None else of_all.count(each)), 1)
            for each in set(types)
        }
        return [by_type[each] for each in types]

    def _is_current(self, routes: Routes | None) -> bool:
        return routes is not None and routes.version == self.version

    def _forget(self, tenant: str) -> None:
        if (routes := self._of_tenant.pop(tenant, None)) is not None:
            self._segments -= routes.segments

    # -------------------------------------------------------------- buckets

    def reserve(self, tenant: str, deliveries: int, now: float) -> bool:
        """Take the deliveries of a request from the buckets if both cover it.

        Before it is published, because others of the tenant may be published meanwhile.
        """
        covers = not self._tenants.wait_s(tenant, now, deliveries) and not self._together.wait_s(
            None, now, deliveries
        )
        if covers:
            self._tenants.charge(tenant, now, deliveries)
            self._together.charge(None, now, deliveries)
        return covers

    def release(self, tenant: str, deliveries: int, now: float) -> None:
        """Return what was reserved for a request that has published nothing."""
        self._tenants.charge(tenant, now, -deliveries)
        self._together.charge(None, now, -deliveries)

    def drain(self, tenant: str, now: float) -> None:
        """Empty the bucket of a tenant whose request was held.

        Otherwise it would have its burst again when what is held has been published, and then twice
        its share.
        """
        self._tenants.drain(tenant, now)
