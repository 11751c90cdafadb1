"""The table of routes: everything that the API can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.api import (
    api_tokens,
    dead_letters,
    endpoint_config,
    endpoints,
    erase,
    events,
    idempotency_keys,
    journal,
    live,
    replays,
    schedules,
    status,
)

if TYPE_CHECKING:
    from outbox.api.route import Route

ROUTES: tuple[Route, ...] = (
    *status.ROUTES,
    *live.ROUTES,
    *endpoints.ROUTES,
    *endpoint_config.ROUTES,
    *events.ROUTES,
    *dead_letters.ROUTES,
    *replays.ROUTES,
    *schedules.ROUTES,
    *idempotency_keys.ROUTES,
    *erase.ROUTES,
    *journal.ROUTES,
    *api_tokens.ROUTES,
)
