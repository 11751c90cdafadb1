"""Why a delivery was dead-lettered: values of `dead_letter.reason`, API fields and labels."""

from __future__ import annotations

from typing import Literal, TypeAlias

LaneDeadLetterReason: TypeAlias = Literal[
    "refused", "exhausted", "expired", "erased", "missing", "skipped", "backlog", "adopted"
]
"""Why a lane dead-letters a delivery."""
DeadLetterReason: TypeAlias = Literal[
    "refused",
    "exhausted",
    "expired",
    "erased",
    "missing",
    "skipped",
    "backlog",
    "adopted",
    "disabled",
    "removed",
]
"""Why a delivery was dead-lettered, by its lane or because its endpoint was disabled or removed."""
