"""Altered secrets: simulated endpoints have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.endpoint import Endpoint
    from tests.sim.database.connection import Connection


async def journal_altered_secrets(
    connection: Connection, endpoints: Sequence[Endpoint], actor: str, version: int
) -> None:
    assert not endpoints
