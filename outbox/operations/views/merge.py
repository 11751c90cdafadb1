"""Merge of several objects into one JSON object."""

from __future__ import annotations

from typing import Any


def merge_fields(*parts: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of all parts in one dictionary."""
    return {
        name: getattr(part, name)
        for part in parts
        for name in part.__slots__
        if name not in without
    }
