"""A cache of the server's built-in types, loaded once per process instead of per connection.

asyncpg knows built-in scalar types, and queries the server about arrays and multiranges: once per
connection, when it first meets one; the query takes the server 15 ms.  That is half of the cost of
opening a relay's connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Iterable

OID_MAX = 9999
"""Up to this OID, a type has the same OID in every database of every version.
https://www.postgresql.org/docs/current/system-catalog-initial-data.html (OID Assignment)"""

LOAD_TYPES = """
SELECT $1::bigint[], $2::integer[], $3::real[], $4::double precision[], $5::boolean[],
       $6::text[], $7::timestamptz[], $8::jsonb[], $9::uuid[], $10::int8multirange
"""


class _NoStatement(NamedTuple):
    """Stands for the introspection statement: no statement was prepared, so none was evicted."""

    name: str = "not prepared"


class TypeCachingConnection(asyncpg.Connection):  # type: ignore[misc]
    """A connection that introspects built-in types only if no other connection has."""

    __slots__ = ()
    _known: ClassVar[dict[frozenset[int], Any]] = {}

    async def _introspect_types(self, typeoids: Iterable[int], *args: Any) -> Any:
        # asyncpg has no public API to declare types.  If it renames this method, each connection
        # introspects for itself again.
        oids = frozenset(typeoids)
        if oids in self._known:
            return self._known[oids], _NoStatement()
        types, statement = await super()._introspect_types(oids, *args)
        if max(oids) <= OID_MAX:
            self._known[oids] = types
        return types, statement


async def load_types(connection: asyncpg.Connection) -> None:
    """Load every type that our statements use, before there is something to deliver."""
    # Not prepared explicitly: behind a proxy the name would remain in another client's session.
    await connection.fetchrow(LOAD_TYPES, *[None] * 10)
