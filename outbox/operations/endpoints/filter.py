"""Filter of endpoints in a listing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.endpoint_condition import CONDITIONS
from outbox.errors import UsageError
from outbox.operations.lanes import BLOCKED, FAILING, SUBSCRIBED
from outbox.store.sql.type_match import TYPE_MATCHES

if TYPE_CHECKING:
    from outbox.core.model.endpoint_condition import EndpointCondition

# `endpoint_condition` of an endpoint `e`; a test compares them.
CONDITION = f"""
    CASE WHEN e.state <> 'active' THEN e.state
         WHEN {BLOCKED} THEN 'blocked'
         WHEN NOT {SUBSCRIBED} THEN 'draining'
         ELSE (SELECT CASE WHEN h.state <> 'healthy' THEN h.state
                           WHEN EXISTS (SELECT FROM lane_progress l
                                         WHERE l.endpoint_id = e.id AND {FAILING}) THEN 'degraded'
                           ELSE 'healthy' END
                 FROM endpoint_health h WHERE h.endpoint_id = e.id) END"""  # noqa: S608


def matches_filter(first: int) -> str:
    """SQL condition: whether a filter includes the endpoint `e`.

    Args:
        first: number of the first parameter of `EndpointFilter.arguments`.
    """
    search, tenant, event_type, condition = (f"${n}::text" for n in range(first, first + 4))
    receives = TYPE_MATCHES.replace("s.types", "e.types").replace("o.type", event_type)
    return f"""
    ({search} IS NULL OR strpos(lower(e.name), lower({search})) > 0
                      OR strpos(lower(e.url), lower({search})) > 0)
    AND ({tenant} IS NULL OR e.tenant = {tenant})
    AND ({event_type} IS NULL OR {receives})
    AND ({condition} IS NULL OR {CONDITION} = {condition})"""


@dataclass(frozen=True, slots=True)
class EndpointFilter:
    """Conditions on endpoints, combined with AND.

    Raises:
        UsageError: a text is empty, or the condition is unknown.
    """

    search: str | None = None
    """Contained in the name or the URL, in upper or lower case."""
    tenant: str | None = None
    type: str | None = None
    """Type of an event: the endpoint's types match it."""
    condition: EndpointCondition | None = None

    def __post_init__(self) -> None:
        for name in ("search", "tenant", "type"):
            if getattr(self, name) == "":
                # Probably an unset shell variable.
                raise UsageError(f"{name} is empty")
        if self.condition is not None and self.condition not in CONDITIONS:
            raise UsageError(
                f'"{self.condition}" is not a condition; choose one of: {", ".join(CONDITIONS)}'
            )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `matches_filter`."""
        return self.search, self.tenant, self.type, self.condition
