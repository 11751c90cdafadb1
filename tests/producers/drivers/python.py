"""Publishes with drivers of Python that the package does not know.

Reads {"driver", "dsn", "statements"} from stdin, and writes the errors to stdout.  A statement is
{"text", "arguments"}, with $1, $2 … in its text.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

Statement = dict[str, Any]


def parts_of(dsn: str) -> dict[str, Any]:
    url = urlsplit(dsn)
    found = {
        "host": url.hostname,
        "port": url.port,
        "user": unquote(url.username or ""),
        "password": unquote(url.password or ""),
        "database": url.path[1:],
    }
    return {name: value for name, value in found.items() if value}


def formatted(text: str) -> str:
    return re.sub(r"\$\d+", "%s", text)


class Pg8000:
    async def open(self, dsn: str) -> None:
        import pg8000.native

        self.connection = pg8000.native.Connection(**parts_of(dsn))

    async def run(self, text: str, arguments: list[Any]) -> None:
        named = {f"p{n}": value for n, value in enumerate(arguments, 1)}
        self.connection.run(re.sub(r"\$(\d+)", r":p\1", text), **named)


class Pg8000Dbapi:
    async def open(self, dsn: str) -> None:
        import pg8000.dbapi

        self.connection = pg8000.dbapi.connect(**parts_of(dsn))
        self.connection.autocommit = True

    async def run(self, text: str, arguments: list[Any]) -> None:
        self.connection.cursor().execute(formatted(text), arguments)


class Psqlpy:
    async def open(self, dsn: str) -> None:
        import psqlpy

        self.connection = await psqlpy.connect(dsn=dsn)

    async def run(self, text: str, arguments: list[Any]) -> None:
        await self.connection.execute(text, arguments)


class Aiopg:
    async def open(self, dsn: str) -> None:
        import aiopg

        self.connection = await aiopg.connect(dsn)

    async def run(self, text: str, arguments: list[Any]) -> None:
        async with self.connection.cursor() as cursor:
            await cursor.execute(formatted(text), arguments)


class Peewee:
    async def open(self, dsn: str) -> None:
        from playhouse.db_url import connect

        self.database = connect(dsn)

    async def run(self, text: str, arguments: list[Any]) -> None:
        with self.database.atomic():
            self.database.execute_sql(formatted(text), arguments)


class Tortoise:
    async def open(self, dsn: str) -> None:
        from tortoise import Tortoise, connections

        await Tortoise.init(
            db_url=dsn.replace("postgresql:", "asyncpg:"), modules={"models": ["__main__"]}
        )
        self.connection = connections.get("default")

    async def run(self, text: str, arguments: list[Any]) -> None:
        await self.connection.execute_query(text, arguments)


class Databases:
    async def open(self, dsn: str) -> None:
        import databases

        self.database = databases.Database(dsn)
        await self.database.connect()

    async def run(self, text: str, arguments: list[Any]) -> None:
        async with self.database.transaction():
            connection = self.database.connection().raw_connection
            await connection.fetch(text, *arguments)


class Piccolo:
    async def open(self, dsn: str) -> None:
        from piccolo.engine.postgres import PostgresEngine

        self.engine = PostgresEngine({"dsn": dsn}, log_queries=False)

    async def run(self, text: str, arguments: list[Any]) -> None:
        async with self.engine.transaction() as transaction:
            await transaction.connection.fetch(text, *arguments)


DRIVERS: dict[str, type[Any]] = {
    "pg8000": Pg8000,
    "pg8000, DB-API": Pg8000Dbapi,
    "psqlpy": Psqlpy,
    "aiopg": Aiopg,
    "peewee": Peewee,
    "tortoise-orm": Tortoise,
    "databases": Databases,
    "piccolo": Piccolo,
}


async def main() -> None:
    given = json.load(sys.stdin)
    driver = DRIVERS[given["driver"]]()
    await driver.open(given["dsn"])
    failures = []
    for statement in given["statements"]:
        try:
            await driver.run(statement["text"], statement["arguments"])
        except Exception as error:
            failures.append(f"{statement['name']}: {error}")
    print(json.dumps(failures), flush=True)
    # Threads of psqlpy may call the interpreter while it ends, which then aborts.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
