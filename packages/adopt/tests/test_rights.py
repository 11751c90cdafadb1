"""An adoption lends nobody the rights of another role.

The triggers of an adoption, and its commands, evaluate what belongs to the adopted table: casts of
its columns, triggers, policies, constraints.  Each attack leaves the role with which it ran.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import pytest

from outbox.core.model.sql_names import quote_ident
from outbox.errors import CannotRun
from outbox.store.connection.migrate import migrate
from outbox.store.connection.store_connection import StoreConnection
from outbox_adopt.end import undo_adoption
from outbox_adopt.mapping import parse_mapping
from outbox_adopt.plan import plan_adoption
from outbox_adopt.source_table import read_source
from outbox_adopt.start import start_adoption
from outbox_adopt.verify import verify_adoption
from tests.support.relay import fetchval
from tests.support.roles import dsn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major]

TABLE = "app.events"
MAPPING = parse_mapping(
    {"type": "kind", "key": "customer", "payload": "body", "sent_column": "sent_at"}
)
PATH = {"server_settings": {"search_path": "relay, pg_temp"}}

# What a hostile role calls: it notes the role whose rights it has, and that of the session.
CREATE = """
CREATE SCHEMA app;
GRANT ALL ON SCHEMA app TO {shop};
SET ROLE {shop};
CREATE TABLE app.witness (had name, session name);
GRANT ALL ON app.witness TO PUBLIC;
CREATE FUNCTION app.note() RETURNS boolean LANGUAGE sql AS
    'INSERT INTO app.witness VALUES (current_user, session_user); SELECT true';
CREATE FUNCTION app.note_early() RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS
    'BEGIN PERFORM app.note(); RETURN true; END';
CREATE FUNCTION app.note_row() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN PERFORM app.note(); RETURN NULL; END';
CREATE TYPE app.customer AS (name text);
CREATE FUNCTION app.name_of(app.customer) RETURNS text LANGUAGE sql AS
    'SELECT ''x'' FROM app.note()';
CREATE CAST (app.customer AS text) WITH FUNCTION app.name_of(app.customer);
CREATE DOMAIN app.label AS text CHECK (value <> '' AND app.note());
GRANT USAGE ON TYPE app.customer, app.label TO PUBLIC;
RESET ROLE;
"""
CREATE_TABLE = """
CREATE TABLE app.events (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind text NOT NULL, customer text,
    body jsonb, sent_at timestamptz)
"""
INSERT = "INSERT INTO app.events (kind, body) VALUES ('order.paid', '{}')"

ATTACKS = {
    "the cast of a column": (
        "ALTER TABLE app.events ALTER customer TYPE app.customer USING NULL",
        "type app.customer belongs to",
    ),
    "a domain": (
        "ALTER TABLE app.events ALTER customer TYPE app.label USING NULL",
        r"(type app.label|function app.note\(\)) belongs to",
    ),
    "an array of a domain": (
        "ALTER TABLE app.events ADD labels app.label[]",
        r"(type app.label(\[\])?|function app.note\(\)) belongs to",
    ),
    "a trigger": (
        "CREATE TRIGGER t AFTER UPDATE ON app.events FOR EACH ROW EXECUTE FUNCTION app.note_row()",
        r"function app.note_row\(\) belongs to",
    ),
    "the right to create triggers": (
        "GRANT ALL ON app.events TO {shop}",
        'may create triggers on app.events, .* REVOKE TRIGGER ON app.events FROM "?{shop}',
    ),
    "everybody's right to create triggers": (
        "GRANT TRIGGER ON app.events TO PUBLIC",
        "may create triggers on app.events, .* REVOKE TRIGGER ON app.events FROM PUBLIC",
    ),
    "a policy": (
        "ALTER TABLE app.events ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; "
        "CREATE POLICY p ON app.events USING (app.note())",
        r"function app.note\(\) belongs to",
    ),
    "a constraint": (
        "ALTER TABLE app.events ADD CHECK (app.note())",
        r"function app.note\(\) belongs to",
    ),
    "a default": (
        "ALTER TABLE app.events ADD flag boolean DEFAULT app.note()",
        r"function app.note\(\) belongs to",
    ),
    "a generated column": (
        "ALTER TABLE app.events ADD flag boolean GENERATED ALWAYS AS (app.note_early()) STORED",
        r"function app.note_early\(\) belongs to",
    ),
    "an index": (
        "CREATE INDEX ON app.events (id) WHERE app.note_early() AND sent_at IS NULL",
        r"function app.note_early\(\) belongs to",
    ),
    "a rule": (
        "CREATE RULE r AS ON UPDATE TO app.events DO ALSO SELECT app.note()",
        r"function app.note\(\) belongs to",
    ),
    "a child": (
        "CREATE TABLE app.more () INHERITS (app.events); ALTER TABLE app.more OWNER TO {shop}",
        "table app.more belongs to",
    ),
}
"""What another role owns of a table that belongs to the operator, and how it is refused."""


class Shop(NamedTuple):
    """A database with the role of an application."""

    database: Database
    operator: Connection[Any]
    role: str
    """Quoted for SQL."""

    async def execute(self, sql: str) -> None:
        """As the operator."""
        await self.operator.execute(sql.format(shop=self.role))

    @asynccontextmanager
    async def signed_in(self) -> AsyncIterator[Connection[Any]]:
        """A session of the application."""
        connection = await asyncpg.connect(dsn_of(self.database, self.role.strip('"')))
        try:
            yield connection
        finally:
            await connection.close()

    async def had(self) -> set[str]:
        """The roles whose rights the application's code has had."""
        rows = await self.operator.fetch("SELECT had, session FROM app.witness")
        return {name for row in rows for name in row} - {self.role.strip('"')}


@pytest.fixture
async def shop(database: Database) -> AsyncIterator[Shop]:
    operator = await database.connect(**PATH)
    async with a_role(operator, f"{database.name}_shop") as role:
        here = Shop(database, operator, role)
        await here.execute(CREATE)
        yield here
        await operator.execute("DROP SCHEMA app CASCADE; ALTER SCHEMA relay OWNER TO CURRENT_USER")


@asynccontextmanager
async def a_role(operator: Connection[Any], name: str) -> AsyncIterator[str]:
    role = quote_ident(name)
    await operator.execute(f"CREATE ROLE {role} LOGIN")
    try:
        yield role
    finally:
        await operator.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


async def start(operator: Connection[Any]) -> None:
    await start_adoption(operator, "relay", TABLE, MAPPING, actor="test", accept_subscribers=True)


async def is_untouched(shop: Shop) -> bool:
    return not await fetchval(
        shop.database,
        "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'app.events'::regclass "
        "AND tgname LIKE 'outbox%'",
    )


async def test_a_table_of_the_application_is_not_adopted_by_a_superuser(shop: Shop) -> None:
    """The attack in full: the owner makes a type whose cast runs when a row is inserted."""
    await shop.execute(f"SET ROLE {{shop}}; {CREATE_TABLE}; RESET ROLE")
    with pytest.raises(
        CannotRun, match=r"app\.events belongs to .* must be the same role"
    ) as error:
        await start(shop.operator)
    assert "\n" not in str(error.value)
    async with shop.signed_in() as attacker:
        await attacker.execute("ALTER TABLE app.events ALTER customer TYPE app.customer USING NULL")
        await attacker.execute(
            "INSERT INTO app.events (kind, customer, body) VALUES ('order.paid', ROW('x'), '{}')"
        )
    for command in (start, plan, undo, verify):
        with pytest.raises(CannotRun, match="must be the same role"):
            await command(shop.operator)
    assert await shop.had() == set()
    assert await is_untouched(shop)


async def plan(operator: Connection[Any]) -> None:
    await plan_adoption(operator, "relay", TABLE, MAPPING)


async def verify(operator: Connection[Any]) -> None:
    await verify_adoption(operator, "relay", TABLE)


async def undo(operator: Connection[Any]) -> None:
    options: Any = {"actor": "test", "wait_s": 0.0, "on_waiting": lambda _: None}
    await undo_adoption(operator, "relay", TABLE, **options)


async def test_what_belongs_to_another_role_is_refused_before_it_runs(shop: Shop) -> None:
    """By the function with which each command begins."""
    await shop.execute(CREATE_TABLE)
    await shop.operator.execute(INSERT)
    for attack, (damage, message) in ATTACKS.items():
        transaction = shop.operator.transaction()
        await transaction.start()
        await shop.execute(f"{damage}; TRUNCATE app.witness")
        expected = message.format(shop=shop.role.strip('"'))
        with pytest.raises(CannotRun, match=expected) as error:
            await read_source(shop.operator, TABLE)
        assert "\n" not in str(error.value), attack
        assert await shop.operator.fetchval("SELECT count(*) FROM app.witness") == 0, attack
        await transaction.rollback()
    await read_source(shop.operator, TABLE)


async def test_a_session_that_can_return_to_more_rights_is_refused(shop: Shop) -> None:
    """SET ROLE, and SET SESSION AUTHORIZATION, end when the code of a table resets them."""
    await shop.execute("ALTER SCHEMA relay OWNER TO {shop}; GRANT ALL ON SCHEMA relay TO {shop}")
    await shop.execute(f"SET ROLE {{shop}}; {CREATE_TABLE}; RESET ROLE")
    for change in ("SET ROLE {shop}", "SET SESSION AUTHORIZATION {shop}"):
        await shop.execute(change)
        with pytest.raises(CannotRun, match="connect as that role, without SET ROLE"):
            await plan(shop.operator)
        await shop.operator.execute("RESET SESSION AUTHORIZATION; RESET ROLE")


@pytest.mark.parametrize(
    "later",
    [
        "ALTER TABLE app.events OWNER TO {shop}; SET ROLE {shop}; "
        "ALTER TABLE app.events ALTER customer TYPE app.customer USING NULL; RESET ROLE",
        "GRANT ALL ON app.events TO {shop}; SET ROLE {shop}; CREATE TRIGGER t AFTER UPDATE "
        "ON app.events FOR EACH ROW EXECUTE FUNCTION app.note_row(); RESET ROLE",
    ],
    ids=["another owner", "a trigger"],
)
async def test_a_change_after_the_beginning_runs_nothing_with_the_owners_rights(
    shop: Shop, later: str
) -> None:
    await shop.execute(f"{CREATE_TABLE}; GRANT INSERT ON app.events TO {{shop}}")
    await start(shop.operator)
    async with shop.signed_in() as application:
        await application.execute(INSERT)
        await shop.execute(later)
        await shop.operator.execute("TRUNCATE app.witness")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="see: outbox adopt verify"):
            await application.execute(INSERT)
    with pytest.raises(CannotRun):
        await verify(shop.operator)
    assert await shop.had() == set()


@pytest.mark.full
async def test_the_owner_of_both_adopts_without_more_rights(empty_database: Database) -> None:
    """The right way: one role for the table and the outbox, and an application that inserts."""
    superuser = await empty_database.connect(**PATH)
    names = (f"{empty_database.name}_{each}" for each in ("owner", "shop"))
    async with AsyncExitStack() as stack:
        owner, shop = [await stack.enter_async_context(a_role(superuser, each)) for each in names]
        database = quote_ident(empty_database.name)
        await superuser.execute(f"GRANT CREATE ON DATABASE {database} TO {owner}")
        connection = await asyncpg.connect(
            dsn_of(empty_database, owner.strip('"')), connection_class=StoreConnection, **PATH
        )
        stack.push_async_callback(connection.close)
        await migrate(connection, "relay")
        await connection.execute(f"CREATE SCHEMA app; {CREATE_TABLE}")
        # Types and functions of one's own, and those of superusers, are no other role's.
        await connection.execute(
            "CREATE TYPE app.level AS ENUM ('low', 'high'); "
            "ALTER TABLE app.events ADD level app.level; "
            "CREATE FUNCTION app.nothing() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN RETURN NULL; END'; CREATE TRIGGER own AFTER UPDATE ON app.events "
            "FOR EACH ROW EXECUTE FUNCTION app.nothing(); "
            f"GRANT USAGE ON SCHEMA app TO {shop}; GRANT INSERT ON app.events TO {shop}"
        )
        await start(connection)
        application = await asyncpg.connect(dsn_of(empty_database, shop.strip('"')))
        stack.push_async_callback(application.close)
        await application.execute(INSERT)
        report = await verify_adoption(connection, "relay", TABLE)
        assert (report.rows, report.violations) == ({"rehearsed": 1}, 0)
        await undo(connection)
