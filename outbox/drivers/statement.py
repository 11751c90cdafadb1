"""Statements with named parameters, and their conversion to the styles of the drivers.

Parameters are written `:name`, always inside of `CAST(:name AS type)`: SQLAlchemy does not accept
`:name::type`, and asyncpg takes a parameter's type from its cast.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Rows: TypeAlias = Sequence[Sequence[Any]]

_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Call:
    """A statement and its parameters."""

    sql: str
    parameters: dict[str, Any]


Plan: TypeAlias = Generator[Call, Rows, T]
"""Yields statements, is sent the rows of each, and returns a result."""


@cache
def numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Convert :name parameters to $1, $2 …; returns the SQL and the names in order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _PARAMETER.sub(number, sql), tuple(names)


@cache
def pyformat(sql: str) -> str:
    """Convert :name parameters to %(name)s."""
    return _PARAMETER.sub(r"%(\1)s", sql)
