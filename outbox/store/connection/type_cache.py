"""Built-in types of the server, asked about once by a process instead of by each connection.

asyncpg knows single values of built-in types, and asks the server about arrays and
multiranges: on each connection, when it first meets one, and the answer takes the server
15 ms.  That is half of what the connections of a relay cost it to begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Iterable

OID_MAX = 9999
"""Up to here a type has the same number in every database of every version.
https://www.postgresql.org/docs/current/system-catalog-initial-data.html (OID Assignment)"""

LEARN_TYPES = """
SELECT $1::bigint[], $2::integer[], $3::real[], $4::double precision[], $5::boolean[],
       $6::text[], $7::timestamptz[], $8::jsonb[], $9::uuid[], $10::int8multirange
"""


class _NotAsked(NamedTuple):
    """In place of the statement by which asyncpg asks: one that took nobody's place."""

    name: str = "not asked"


class KnowingConnection(asyncpg.Connection):  # type: ignore[misc]
    """A connection that asks about built-in types only if no other one did before."""

    __slots__ = ()
    _known: ClassVar[dict[frozenset[int], Any]] = {}

    async def _introspect_types(self, typeoids: Iterable[int], *how: Any) -> Any:
        # asyncpg has no public way to be told what a type is.  If it comes to ask by another
        # name, each connection asks for itself again.
        asked = frozenset(typeoids)
        if asked in self._known:
            return self._known[asked], _NotAsked()
        types, statement = await super()._introspect_types(asked, *how)
        if max(asked) <= OID_MAX:
            self._known[asked] = types
        return types, statement


async def learn_types(connection: asyncpg.Connection) -> None:
    """Meet every type of ours before there is something to deliver."""
    # Not prepared: behind a proxy its name would stay with somebody else's session.
    await connection.fetchrow(LEARN_TYPES, *[None] * 10)
