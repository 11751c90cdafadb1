"""Polling for a condition; the only place in the tests that sleeps."""

from __future__ import annotations

from outbox_devtools.waiting import LIVENESS_S as LIVE_S
from outbox_devtools.waiting import ends_by, until, until_sync

__all__ = ["LIVE_S", "ends_by", "until", "until_sync"]
