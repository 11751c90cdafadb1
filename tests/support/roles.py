"""Least-privilege roles as in an installation: they log in and own nothing."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from outbox.core.model.sql_names import quote_ident, quote_literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database


@asynccontextmanager
async def role(database: Database, *purposes: str) -> AsyncIterator[str]:
    """A role with these purposes, named after them; it exists as long as the database.

    DROP OWNED would take longer than the database takes to be made and dropped, because it removes
    each privilege of each column.
    """
    # Roles belong to the server, which other tests use concurrently.
    name = "-".join((*purposes, database.name, str(len(database.roles))))
    async with database.connection() as owner:
        await owner.execute(f"CREATE ROLE {quote_ident(name)} LOGIN")
        database.roles.append(name)
        for purpose in purposes:
            named = quote_literal(quote_ident(name))
            await owner.execute(f"SELECT {database.schema}.grant_{purpose}({named})")
    yield name


def dsn_of(database: Database, name: str) -> str:
    """The DSN of a role."""
    return database.server.embedded.dsn(database.name, user=name)
