"""Hides events: the partition of the first period is detached by hand, and attached again."""

from __future__ import annotations

from outbox.core.sequencing.partition_window import WIDTH

DETACH = "ALTER TABLE outbox DETACH PARTITION outbox_0"
ATTACH = f"ALTER TABLE outbox ATTACH PARTITION outbox_0 FOR VALUES FROM (0) TO ({WIDTH})"
