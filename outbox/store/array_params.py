"""Columns on their way to `unnest`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


def as_text(values: Iterable[object]) -> str:
    """An array of numbers and plain words as PostgreSQL reads it (`$1::text::bigint[]`).

    Of arrays that it writes itself, asyncpg looks at each element twice before it does.
    """
    return f"{{{','.join(map(str, values))}}}"


def sparse(values: list[T | None]) -> list[T | None]:
    """Without what `unnest` fills up with NULL."""
    return values if any(value is not None for value in values) else []
