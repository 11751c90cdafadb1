"""Errors of connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.core.model.response import Failure

TRANSPORT_CLOSED = "the transport is closed"


class NotConnected(Exception):
    """No connection could be established; nothing was sent."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail
