"""Array parameters for `unnest`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


def as_text(values: Iterable[object]) -> str:
    """An array literal of numbers and plain words (`$1::text::bigint[]`).

    asyncpg checks each element twice when it encodes an array itself.
    """
    return f"{{{','.join(map(str, values))}}}"


def sparse(values: list[T | None]) -> list[T | None]:
    """An empty array if all values are NULL: `unnest` pads a shorter array with NULL."""
    return values if any(value is not None for value in values) else []
