"""`outbox token`: tokens of the HTTP API."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def query(database: Database, sql: str, *arguments: Any) -> list[Any]:
    async def query_database() -> list[Any]:
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            rows: list[Any] = await connection.fetch(sql, *arguments)
            return rows

    return asyncio.run(query_database())


def test_a_secret_is_shown_once_and_kept_as_its_hash(here: Command, database: Database) -> None:
    made = here("token", "add", "ci", "--scope", "publish", "--scope", "read", "--json").json
    assert re.fullmatch("obx_[A-Za-z0-9_-]{43}", made["secret"])
    assert (made["name"], made["scopes"], made["tenant"]) == ("ci", ["read", "publish"], None)
    (row,) = query(database, "SELECT * FROM token")
    assert row["hash"] == hashlib.sha256(made["secret"].encode()).digest()
    assert made["secret"] not in here("token", "list", "--json").out
    (kept,) = query(database, "SELECT actor, kind, data FROM journal")
    assert kept["kind"] == "token_added"
    assert made["secret"] not in kept["data"]
    assert "@" in kept["actor"]


def test_tokens_are_printed_as_text(here: Command) -> None:
    added = here("token", "add", "ci", "--scope", "read", "--tenant", "acme", "--expires", "90d")
    assert added.code == 0
    assert added.out.splitlines()[0] == "name     ci"
    assert "tenant   acme" in added.out
    assert "Save the secret now" in added.err
    listed = here("token", "list").out
    assert listed.splitlines()[0].split()[:5] == ["ID", "NAME", "STATE", "SCOPES", "TENANT"]
    assert "ci" in listed
    assert here("token", "revoke", "ci").out == 'revoked token "ci"\n'
    assert here("token", "list").out == (
        "no tokens; add one with: outbox token add NAME --scope read\n"
    )


def test_listings_are_paged(here: Command) -> None:
    for n in range(3):
        here("token", "add", f"t{n}", "--scope", "read")
    first = here("token", "list", "--limit", 2, "--json")
    assert [row["name"] for row in first.json] == ["t0", "t1"]
    assert "--after 2" in first.err
    (rest,) = here("token", "list", "--after", 2, "--json").json
    assert (rest["name"], rest["state"], rest["last_used_at"]) == ("t2", "live", None)


def test_a_name_is_unique_among_live_tokens(here: Command, database: Database) -> None:
    add = ("token", "add", "ci", "--scope", "read")
    assert here(*add).code == 0
    taken = here(*add)
    assert taken.code == 2
    assert taken.error == (
        'token "ci" exists already; choose another name, or run: outbox token revoke ci'
    )
    assert here("token", "revoke", "ci", "--json").json == {"revoked": "ci"}
    assert here(*add, "--expires", "1h").code == 0
    query(database, "UPDATE token SET expires_at = now() WHERE revoked_at IS NULL")
    (expired,) = here("token", "list", "--json").json
    assert expired["state"] == "expired"
    assert here(*add).code == 0
    rows = here("token", "list", "--revoked", "--json").json
    assert [row["state"] for row in rows] == ["revoked", "revoked", "live"]


INVALID_TOKENS = (
    (["ci"], "--scope"),
    (["ci", "--scope", "all"], "'all' is not one of 'read', 'publish', 'operate'"),
    (["two words", "--scope", "read"], "name: 'two words' is not 1 to 100 letters"),
    ([".", "--scope", "read"], "name: '.' is not 1 to 100 letters"),
    (["ci", "--scope", "read", "--expires", "soon"], '"soon" is not a time'),
    (["ci", "--scope", "read", "--expires", "4000d"], "expires: "),
    (["ci", "--scope", "read", "--tenant", ""], "tenant: 0 bytes, must be 1 to 255"),
)


def test_an_invalid_token_is_rejected(here: Command, subtests: pytest.Subtests) -> None:
    for arguments, says in INVALID_TOKENS:
        with subtests.test(arguments=arguments, says=says):
            result = here("token", "add", *arguments)
            assert result.code == 2
            assert says in result.error


def test_an_unknown_token_cannot_be_revoked(here: Command) -> None:
    result = here("token", "revoke", "nobody")
    assert (result.code, result.error) == (2, 'there is no token "nobody"; see: outbox token list')


def test_the_help_explains_the_scopes(outbox: Command) -> None:
    reported = outbox("token", "add", "--help").out
    for word in ("read", "publish", "operate", "independent of each other", "tenant"):
        assert word in reported
    # As docs/concepts/security.md has it, and the API does.
    assert "including payloads, except receivers' responses" in reported
