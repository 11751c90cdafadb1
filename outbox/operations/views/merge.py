"""One object out of several that tell of the same thing."""

from __future__ import annotations

from typing import Any


def flat(*parts: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of all parts, beside each other."""
    return {
        name: getattr(part, name)
        for part in parts
        for name in part.__slots__
        if name not in without
    }
