"""A database that only speaks PostgreSQL's protocol is refused, in one line that names it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.errors import CannotRun
from outbox.store.connection import connect as connect_module
from outbox.store.connection.connect import connect
from outbox.store.connection.current_schema import require_current
from outbox.store.connection.dsn import parse
from outbox.store.connection.migrate import migrate
from outbox.store.schema.server_product import explain_foreign_product
from outbox_doctor.check import Severity
from tests.support.doctor import findings
from tests.support.documents import read
from tests.support.process import outbox
from tests.support.tcp import forward_to, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.support.postgres import Database

# What `version()` returns, as their documentation and their users show it:
#   CockroachDB: docs.docker.com/guides/golang/develop
#   YugabyteDB: docs.yugabyte.com/latest/api/ysql, github.com/yugabyte/yugabyte-db/issues/5154
#   Redshift: docs.aws.amazon.com/redshift/latest/dg/r_VERSION.html, SQLAlchemy's tests
#   Greenplum: its src/test/regress/sql/gp_metadata.sql, and the log of gpstate
#   Cloudberry: pigsty.io/docs/pgsql/kernel/cloudberry
#   QuestDB: questdb.com/docs/reference/function/meta, its Constants.java
#   CrateDB: the doctests of crate-python
#   CedarDB, Materialize, RisingWave, openGauss: what their users print
FOREIGN = {
    "CockroachDB CCL v20.1.15 (x86_64-unknown-linux-gnu, built 2021/04/26 16:11:58, go1.13.9)": (
        "CockroachDB"
    ),
    "PostgreSQL 15.2-YB-2025.1.2.0-b0 on x86_64-pc-linux-gnu, compiled by clang version 17.0.6, "
    "64-bit": "YugabyteDB",
    "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2 20041017 "
    "(Red Hat 3.4.2-6.fc3), Redshift 1.0.48805": "Amazon Redshift",
    "PostgreSQL 12.12 (Greenplum Database 7.4.0 build commit:27de6dc6d) on x86_64-pc-linux-gnu, "
    "compiled by gcc (GCC) 8.5.0 20210514 (Red Hat 8.5.0-22), 64-bit": "Greenplum",
    "PostgreSQL 14.4 (Apache Cloudberry 2.0.0-incubating build 1) on aarch64-unknown-linux-gnu, "
    "compiled by gcc (GCC) 11.5.0 20240719 (Red Hat 11.5.0-11), 64-bit": "Apache Cloudberry",
    "PostgreSQL 9.5 on x86_64-unknown-linux-gnu (Materialize 26.36.0)": "Materialize",
    "PostgreSQL 13.14.0-RisingWave-3.0.2 (391c3a16ef26d0cd86d1236c9b7c122a9a27fb1e)": "RisingWave",
    "PostgreSQL 12.3, compiled by Visual C++ build 1914, 64-bit, QuestDB": "QuestDB",
    "PostgreSQL 16.3 compatible CedarDB v2025-08-20": "CedarDB",
    "CrateDB 5.2.3 (built 88bd0e5/2023-02-21, Linux amd64, OpenJDK 64-Bit Server VM)": "CrateDB",
    "(openGauss 5.0.0 build a07d57c3) compiled at 2023-03-29 03:09:38 commit 0": "openGauss",
    "PostgreSQL 14.1": "a database that only speaks PostgreSQL's protocol",
}
# Distributions of PostgreSQL.
POSTGRESQL = (
    "PostgreSQL 18.4 on x86_64-pc-linux-gnu, compiled by gcc (GCC) 13.2.1, 64-bit",
    "PostgreSQL 14.9 (Debian 14.9-1.pgdg120+1) on x86_64-pc-linux-gnu, compiled by gcc "
    "(Debian 12.2.0-14) 12.2.0, 64-bit",
    "PostgreSQL 16.2, compiled by Visual C++ build 1937, 64-bit",
    "PostgreSQL 19devel on x86_64-linux, compiled by gcc-13.2.0, 64-bit",
    "PostgreSQL 15.4 on aarch64-unknown-linux-gnu, compiled by aarch64-unknown-linux-gnu-gcc "
    "(GCC) 9.5.0, 64-bit",
    "PostgreSQL 16.4 (EnterpriseDB Advanced Server 16.4.1) on x86_64-pc-linux-gnu, compiled by gcc "
    "(GCC) 11.4.1 20231218 (Red Hat 11.4.1-3), 64-bit",
    "PostgreSQL 17.4 - Percona Server for PostgreSQL 17.4.1 on x86_64-pc-linux-gnu, compiled by "
    "gcc (GCC) 11.5.0",
    "PostgreSQL 18.4 (pgEdge 5.0.10) on x86_64-pc-linux-gnu, compiled by gcc (GCC) 14.3.1, 64-bit",
)


@pytest.mark.parametrize(("version", "product"), FOREIGN.items(), ids=FOREIGN.values())
def test_a_database_that_is_not_postgresql_is_named(version: str, product: str) -> None:
    reason = explain_foreign_product(version)
    assert reason is not None
    assert reason.startswith(f"the server is {product}, which is not supported")
    assert "\n" not in reason


def test_distributions_of_postgresql_are_postgresql() -> None:
    assert [each for each in POSTGRESQL if explain_foreign_product(each) is not None] == []


PRODUCT = {b"PostgreSQL ": b"CockroachDB"}
PARAMETER = {b"is_superuser": b"crdb_version"}
"""What a proxy replaces: each has as many letters as the other."""


@asynccontextmanager
async def as_cockroachdb(
    database: Database, replaced: Mapping[bytes, bytes] = PRODUCT
) -> AsyncIterator[str]:
    """A DSN through a proxy that changes the product that the server reports."""
    path = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")
    async with listening(forward_to(path, replaced)) as port:
        yield f"postgresql://postgres@127.0.0.1:{port}/{database.name}"


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.one_major
async def test_commands_refuse_it_in_one_line(empty_database: Database) -> None:
    async with as_cockroachdb(empty_database) as dsn:
        migrated = await outbox("migrate", env={"OUTBOX_DSN": dsn})
        assert migrated.code == 3
        assert migrated.stderr.startswith("outbox: the server is CockroachDB, which is not")
        assert migrated.stderr.count("\n") == 1
        assert migrated.stderr in read("docs/howto/use-managed-postgresql.md")
        connection = await connect(parse(dsn, source="OUTBOX_DSN", env={}), schema="relay")
        schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'relay'"
        assert await connection.fetchval(schemas) == 0
        with pytest.raises(CannotRun, match="the server is CockroachDB"):
            await require_current(connection, "relay")  # As relays and the API do at the start.
        (found,) = await findings(connection)
        assert (found.check, found.severity) == ("server", Severity.PROBLEM)
        assert found.message.startswith("the server is CockroachDB")
        await connection.close()


@pytest.mark.one_major
async def test_the_login_refuses_one_with_an_old_number_or_a_parameter_of_its_own(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with as_cockroachdb(database, PRODUCT | PARAMETER) as dsn:
        address = parse(dsn, source="OUTBOX_DSN", env={})
        with pytest.raises(CannotRun, match="the server is CockroachDB"):
            await connect(address, schema="relay")
    monkeypatch.setattr(connect_module, "SERVER_VERSION_MIN", 99)
    async with as_cockroachdb(database) as dsn:
        address = parse(dsn, source="OUTBOX_DSN", env={})
        with pytest.raises(CannotRun, match="the server is CockroachDB"):
            await connect(address, schema="relay")


@pytest.mark.one_major
async def test_a_schema_that_citus_would_distribute_is_not_created(
    empty_database: Database,
) -> None:
    async with empty_database.connection() as connection:
        await connection.execute("SET citus.enable_schema_based_sharding = on")
        with pytest.raises(CannotRun, match="Citus would distribute the schema") as caught:
            await migrate(connection, "relay")
        with pytest.raises(asyncpg.InvalidSchemaNameError):
            await connection.execute("CREATE TABLE relay.t ()")
        advice = str(caught.value).partition("run: ")[2]
        await connection.execute("RESET citus.enable_schema_based_sharding")
        await connection.execute(f"BEGIN; {advice}; ROLLBACK")
