"""The table of routes: everything that the API can do, module by module."""

from __future__ import annotations

from outbox_api import (
    api_tokens,
    dead_letters,
    deliveries,
    endpoint_config,
    endpoint_credentials,
    endpoint_form,
    endpoint_states,
    endpoints,
    erase,
    events,
    future_events,
    history,
    idempotency_keys,
    journal,
    live,
    quotas,
    replays,
    schedules,
    status,
)
from outbox_api.route import Route

_MODULES = (
    status,
    live,
    endpoints,
    endpoint_states,
    endpoint_credentials,
    endpoint_form,
    endpoint_config,
    events,
    future_events,
    deliveries,
    history,
    dead_letters,
    replays,
    schedules,
    idempotency_keys,
    quotas,
    erase,
    journal,
    api_tokens,
)
ROUTES: tuple[Route, ...] = tuple(
    each for module in _MODULES for each in vars(module).values() if isinstance(each, Route)
)
