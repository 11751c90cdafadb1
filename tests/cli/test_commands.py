"""Output of each command on a real database, as text and as JSON."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.cli import publish as publish_command
from outbox.store.schema import lock_attempts
from outbox.store.schema.migration_files import migrations
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/hooks"
ONE_LANE = ("--lanes", 1)


def execute(database: Database, sql: str) -> Any:
    """Run statements; returns the first value of the last one."""

    async def query_database() -> Any:
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            *first, last = [s for s in sql.split(";") if s.strip()]
            for statement in first:
                await connection.execute(statement)
            return await connection.fetchval(last)

    return asyncio.run(query_database())


FILES = [str(migration) for migration in migrations()]
LAST = len(FILES)


def add_dead_letters(database: Database, endpoint: str) -> None:
    """Insert a dead letter of an endpoint, and a range."""
    execute(
        database,
        f"""
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, event_id,
               type, key, payload, headers, published_at, reason, attempts, last_response)
        SELECT e.id, l.id, 0, 7, 7, 1, gen_random_uuid(), 'a.b', E'k\x1b[31m', '{{"n": 7}}',
               '{{"X-A": "b"}}', now(), 'refused', 3, '{{"status": 410, "body": "gone"}}'
          FROM endpoint e JOIN lane l ON l.endpoint_id = e.id AND l.slot = 0
         WHERE e.name = '{endpoint}';
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts)
        SELECT e.id, l.id, 0, 10, 19, 'removed', 0
          FROM endpoint e JOIN lane l ON l.endpoint_id = e.id AND l.slot = 0
         WHERE e.name = '{endpoint}'
        """,
    )


# ------------------------------------------------------------------ migrate


def test_migrate(outbox: Command, empty_database: Database) -> None:
    env = {"OUTBOX_DSN": empty_database.dsn, "OUTBOX_SCHEMA": "My schema"}
    check = outbox("migrate", "--check", **env)
    assert check.code == 1
    assert check.out == (
        f'schema "My schema" is at version 0; pending: {", ".join(FILES)}; '
        "run: outbox migrate --schema 'My schema'\n"
    )
    assert outbox("migrate", "--check", "--json", **env).json == {
        "schema": "My schema",
        "version": 0,
        "pending": FILES,
    }
    assert outbox("migrate", **env).out == (
        f'schema "My schema" is at version {LAST}; applied {FILES[0]}, …, {FILES[-1]}\n'
    )
    again = outbox("migrate", **env)
    assert (again.code, again.out) == (0, f'schema "My schema" is up to date, at version {LAST}\n')
    assert outbox("migrate", "--json", **env).json == {
        "schema": "My schema",
        "version": LAST,
        "applied": [],
        "roles": [],
        "roles_created": [],
        "revoked": [],
        "partitions_dropped": 0,
        "payload_bytes_max": None,
    }
    check = outbox("migrate", "--check", **env)
    assert (check.code, check.out) == (0, f'schema "My schema" is up to date, at version {LAST}\n')


def test_migrate_prints_sql_without_a_database(outbox: Command, empty_database: Database) -> None:
    script = outbox("migrate", "--sql", "--schema", "by_hand", "--payload-bytes-max", "5000")
    assert script.code == 0
    assert script.out.rstrip().endswith("COMMIT;")
    # psql would print an empty table for each.
    assert "\nSELECT " not in script.out

    async def apply() -> None:
        async with empty_database.connection() as connection:
            await connection.execute(script.out)

    asyncio.run(apply())
    result = outbox("migrate", "--check", "--schema", "by_hand", OUTBOX_DSN=empty_database.dsn)
    assert result.code == 0


def test_migrate_rejects_a_newer_schema(here: Command, database: Database) -> None:
    execute(database, "INSERT INTO migration VALUES (99, 'future', 'x', 99)")
    for command in (["migrate"], ["migrate", "--check"], ["status"], ["endpoint", "list"]):
        result = here(*command)
        assert result.code == 3
        assert f"is at version 99, this program knows {LAST}; upgrade outbox-" in result.error


async def test_migrate_names_the_blocking_session(
    here: Command, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_attempts, "RETRY_FOR_S", 3.0)
    async with database.connection() as producer:
        await producer.execute("BEGIN; INSERT INTO relay.outbox (type, payload) VALUES ('a', '1')")
        result = await asyncio.to_thread(here, "migrate", "--payload-bytes-max", "5000")
        pid = producer.get_server_pid()
    assert result.code == 3
    assert result.error.startswith(
        f"the payload limit was not changed: after 3 s pid {pid} (role postgres, in a transaction"
    )
    assert result.error.endswith(
        "still holds a lock that it needs; wait for its end, or end it: "
        f"SELECT pg_terminate_backend({pid})"
    )


def test_migrate_grants_and_limits(here: Command, database: Database) -> None:
    result = here("migrate", "--producer", "no_such_role")
    assert (result.code, result.error) == (
        2,
        'role "no_such_role" does not exist; CREATE ROLE it first',
    )
    assert here("migrate", "--payload-bytes-max", "10").code == 2
    execute(database, "DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN")
    granted = here("migrate", "--producer", "app", "--payload-bytes-max", "5000")
    assert granted.out == (
        f'schema "relay" is up to date, at version {LAST}\n'
        'role "app" may publish\n'
        "payload limit: 5000 bytes\n"
    )
    as_json = here("migrate", "--producer", "app", "--json").json
    assert as_json["roles"] == [{"purpose": "producer", "role": "app"}]
    assert as_json["payload_bytes_max"] is None
    assert as_json["revoked"] == []
    as_app = {"OUTBOX_DSN": database.server.embedded.dsn(database.name, user="app")}
    assert here("publish", "a.b", **as_app).code == 0
    too_large = here("publish", "a.b", "--payload", '"' + "x" * 5000 + '"', **as_app)
    assert too_large.code == 2
    assert too_large.error == "payload: 5002 bytes as JSON, the limit is 5000"
    first = here("migrate", "--schema", "mine", **as_app)
    assert (first.code, first.error) == (
        3,
        "this role may not create a schema; run: GRANT CREATE ON DATABASE "
        f'"{database.name}" TO "app"',
    )
    denied = here("status", **as_app)
    assert denied.code == 3
    assert "permission denied for table migration" in denied.error


def test_privileges_are_revoked(here: Command, database: Database) -> None:
    execute(database, "DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN")
    assert here("migrate", "--producer", "app").code == 0
    as_app = {"OUTBOX_DSN": database.server.embedded.dsn(database.name, user="app")}
    assert here("migrate", "--revoke", "app", "--check").code == 2
    assert here("migrate", "--revoke", "no_such_role").code == 2
    assert here("migrate", "--revoke", "app", "--reader", "app").out == (
        f'schema "relay" is up to date, at version {LAST}\n'
        'role "app": all rights revoked\n'
        'role "app" may read everything but secrets\n'
    )
    assert here("publish", "a.b", **as_app).code == 3
    assert here("status", **as_app).code == 0
    assert here("migrate", "--revoke", "app", "--json").json["revoked"] == ["app"]
    assert here("status", **as_app).code == 3
    execute(database, "DROP OWNED BY app; DROP ROLE app")


# ------------------------------------------------------------------ publish


def test_publishing_for_no_endpoint_is_reported(here: Command) -> None:
    def warning(*args: str) -> str:
        result = here("publish", "--json", *args)
        assert result.code == 0
        assert result.json["already"] is False
        return result.err.removeprefix("outbox: warning: ").rstrip("\n")

    here("endpoint", "add", "shop", URL, "--type", "order.*")
    here("endpoint", "add", "acme", URL, "--type", "cart.*", "--tenant", "acme")
    assert warning("order.paid") == warning("cart.paid", "--tenant", "acme") == ""
    assert warning("ordr.paid") == 'no endpoint subscribes to the type "ordr.paid"'
    to_type = "no endpoint that subscribes to the type "
    assert warning("cart.paid") == f'{to_type}"cart.paid" receives events without a tenant'
    assert warning("order.paid", "--tenant", "acme") == (
        f'{to_type}"order.paid" receives events of tenant "acme"'
    )
    # It gets earlier events first, and then this one.
    here("endpoint", "add", "late", URL, "--type", "late.*", "--from", "beginning")
    assert warning("late.paid") == ""
    here("endpoint", "add", "audit", URL, "--all-tenants")
    assert warning("order.paid", "--tenant", "acme") == warning("ordr.paid") == ""
    here("endpoint", "remove", "shop")
    here("endpoint", "remove", "audit")
    assert warning("order.paid") != ""


def test_an_event_is_published_although_its_endpoints_cannot_be_read(
    here: Command, database: Database
) -> None:
    execute(database, "ALTER TABLE subscription RENAME TO gone")
    assert here("publish", "order.paid").code == 0


async def test_publishing_does_not_wait_for_the_endpoints_of_its_event(
    here: Command, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection falls silent after the event is published."""

    async def read_silence(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(publish_command, "explain_no_subscriber", read_silence)
    monkeypatch.setattr(publish_command, "EXPLAIN_S", 0.1)
    published = asyncio.to_thread(here, "publish", "order.paid")
    assert (await asyncio.wait_for(published, 30)).code == 0
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 1


def test_publish(here: Command, database: Database) -> None:
    result = here("publish", "order.paid", "--key", "order-7", "--payload", '{"order": 7}')
    assert re.fullmatch(r"published [0-9a-f-]{36}\n", result.out)
    response = here(
        "publish", "order.paid", "--json", "--tenant", "t", "--header", "X-A=b=c",
        "--expires-in", "10m",
    ).json  # fmt: skip
    assert response["already"] is False
    row = execute(
        database,
        "SELECT row_to_json(o)::jsonb - 'created_at' - 'expires_at' FROM outbox o WHERE id = 2",
    )
    assert f'"event_id": "{UUID(response["id"])}"' in row
    for part in ('"headers": {"X-A": "b=c"}', '"payload": {}', '"tenant": "t"'):
        assert part in row
    piped = here("publish", "a", "--payload", "-", stdin=b'\n{"piped": [1]}\n')
    assert piped.code == 0
    assert execute(database, "SELECT payload::text FROM outbox WHERE id = 3") == '{"piped": [1]}'
    png = ["--payload", "-", "--content-type", "image/png", "--key", "logo"]
    assert here("publish", "image.added", *png, stdin=b"\x89PNG\r\n\0").code == 0
    assert execute(database, "SELECT body FROM outbox WHERE id = 4") == b"\x89PNG\r\n\0"
    assert "payload    7 bytes of image/png\n" in here("trace", "logo", "--payload").out
    here("endpoint", "add", "raw", URL, "--format", "raw")
    preview = here("endpoint", "preview", "raw", "logo")
    assert "Content-Type: image/png\n" in preview.out
    assert "\n(7 bytes that are not text; see body_base64 with --json)\n" in preview.out
    as_json = here("endpoint", "preview", "raw", "logo", "--json").json
    assert (as_json["body"], as_json["body_base64"]) == (None, "iVBORw0KAA==")


def test_a_used_idempotency_key_is_not_an_error(here: Command, database: Database) -> None:
    assert here("publish", "a", "--once", "plan:7").code == 0
    again = here("publish", "a", "--once", "plan:7")
    assert (again.code, again.err) == (0, "")
    assert again.out == 'not published: the idempotency key "plan:7" was already taken\n'
    assert here("publish", "a", "--once", "plan:7", "--json").json == {
        "id": None,
        "already": True,
    }
    assert execute(database, "SELECT count(*) FROM outbox") == 1


INVALID_EVENTS = (
    (["a", "--payload", "{"], b"", "payload: not JSON: unexpected end of data"),
    (["a", "--payload", "-"], b"", "payload: not JSON"),
    (["a", "--payload", "-"], b"\xff", "payload: not JSON"),
    (["a", "--payload", "-"], b"\xff", "other bytes need a content_type"),
    (["a", "--content-type", "a/b"], b"", "--content-type: requires --payload"),
    (
        ["a", "--payload", "x", "--content-type", "png"],
        b"",
        "content_type: 'png' is not a media type",
    ),
    (["a", "--payload", "NaN"], b"", "payload: not JSON"),
    (["a", "--payload", '"\\u0000"'], b"", "payload: PostgreSQL cannot store a NUL"),
    (
        ["a", "--payload", "-"],
        b'"' + b"x" * 262_144 + b'"',
        "payload: 262146 bytes as JSON, the limit is 262144",
    ),
    (["a b"], b"", "type: 'a b' is not dot-separated segments"),
    (["outbox.x"], b"", 'type: "outbox." is reserved'),
    (["a", "--key", "é" * 257], b"", "key: 514 bytes, must be 1 to 512"),
    (["a", "--once", ""], b"", "once: 0 bytes, must be 1 to 512"),
    (["a", "--key", "\udcff"], b"", "key: not Unicode text"),
    (["a", "--header", "X-A"], b"", '--header: "X-A" is not NAME=VALUE'),
    (["a", "--header", "X-Lane=1"], b"", "headers: 'X-Lane' is set by the relay"),
    (["a", "--header", "X-A=1", "--header", "X-A=2"], b"", '"X-A" is given twice'),
)


def test_an_invalid_event_is_rejected(here: Command, subtests: pytest.Subtests) -> None:
    for args, stdin, says in INVALID_EVENTS:
        with subtests.test(args=args, stdin=stdin, says=says):
            result = here("publish", *args, stdin=stdin)
            assert result.code == 2
            assert says in result.error


# ----------------------------------------------------------------- endpoint


def test_endpoint_add_shows_the_secret_once(here: Command) -> None:
    response = here("endpoint", "add", "billing", URL, "--type", "order.*", "--lanes", 2, "--json")
    assert response.err == ""
    made = response.json
    assert list(made) == [
        *("id", "name", "url", "secret", "lanes", "types", "waiting", "events_before"),
        "warnings",
    ]
    assert (made["name"], made["url"], made["lanes"]) == ("billing", URL, 2)
    assert made["secret"].startswith("whsec_")
    UUID(made["id"])
    reported = here("endpoint", "add", "audit", URL, "--all-tenants")
    assert re.search(r"^secret  whsec_\S+$", reported.out, re.MULTILINE)
    assert "not shown again" in reported.err
    for command in (["list"], ["list", "--json"], ["show", "billing"], ["show", "audit", "--json"]):
        assert "whsec_" not in here("endpoint", *command).out


def test_a_new_endpoint_receives_events_that_are_not_sequenced(here: Command) -> None:
    here("publish", "a.b")
    here("publish", "a.b")
    late = here("endpoint", "add", "late", URL, "--json")
    assert late.json["name"] == "late"
    assert late.err == (
        "outbox: warning: 2 events are not sequenced yet; this endpoint also receives "
        "those that match\n"
    )


def test_endpoint_list_and_show(here: Command) -> None:
    assert (
        here("endpoint", "list").out == "no endpoints; add one with: outbox endpoint add NAME URL\n"
    )
    assert here("endpoint", "list", "--json").json == []
    for name in ("b", "a", "c"):
        here("endpoint", "add", name, URL, *ONE_LANE)
    assert here("endpoint", "list", "--search", "nothing").out == "no endpoints match\n"
    table = here("endpoint", "list").out.splitlines()
    assert table[0].split() == [
        "NAME", "URL", "TYPES", "TENANT", "LANES", "STATE", "PENDING", "DEAD_LETTERS",
    ]  # fmt: skip
    assert [line.split()[0] for line in table[1:]] == ["a", "b", "c"]
    first = here("endpoint", "list", "--json", "--limit", 2).json
    assert [e["name"] for e in first] == ["a", "b"]
    cut = here("endpoint", "list", "--limit", 2)
    assert cut.err == "more rows exist; next page: --after b\n"
    assert len(cut.out.splitlines()) == 3
    assert here("endpoint", "list", "--limit", 3).err == ""
    rest = here("endpoint", "list", "--json", "--limit", 2, "--after", "b").json
    assert [e["name"] for e in rest] == ["c"]
    assert rest[0]["types"] == ["**"]
    shown = here("endpoint", "show", "a", "--json").json
    assert shown["endpoint"]["name"] == "a"
    assert [lane["last_seq"] for lane in shown["lanes"]] == [0]
    assert "LANE" in here("endpoint", "show", "a").out


def test_a_token_list_is_filtered(here: Command) -> None:
    here("token", "add", "ci", "--scope", "read", "--tenant", "acme")
    here("token", "add", "ops", "--scope", "operate")
    found = here("token", "list", "--tenant", "acme", "--search", "C", "--json").json
    assert [each["name"] for each in found] == ["ci"]
    assert here("token", "list", "--scope", "publish").out == "no tokens match\n"


INVALID_URLS = (
    ("example.com/hooks", "url: must start with https://"),
    ("ftp://example.com/", "url: nothing that is installed here knows ftp://, but https, kafka, "),
    ("https://", "url: "),
    ("https://user:hunter2@example.com/", "url: must not contain a user or password"),
    ("http://example.com/", "url: the connection would not be encrypted"),
    ("https://127.0.0.1/", "url: 127.0.0.1 is loopback"),
    ("https://localhost/", "url: localhost is loopback"),
    ("https://10.0.0.5/", "OUTBOX_ALLOW_NETWORKS"),
    ("https://example.com:22/", "url: port 22"),
    ("https://exa mple.com/", "url: "),
)


def test_an_invalid_url_is_rejected(here: Command, subtests: pytest.Subtests) -> None:
    for url, says in INVALID_URLS:
        with subtests.test(url=url, says=says):
            result = here("endpoint", "add", "a", url)
            assert result.code == 2
            assert says in result.error
            assert "hunter2" not in result.error


def test_allowed_networks_accept_any_url(here: Command) -> None:
    opened = {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8, ::1"}
    added = here("endpoint", "add", "a", "http://127.0.0.1:9/", **opened)
    assert added.code == 0
    assert "only OUTBOX_ALLOW_NETWORKS opens this address: set it for every relay, too" in added.err
    of_its_own = ("http://127.0.0.1:9/", "--allow-network", "127.0.0.0/8")
    assert "for every relay" not in here("endpoint", "add", "own", *of_its_own).err
    wrong = here("endpoint", "add", "b", URL, OUTBOX_ALLOW_NETWORKS="127.0.0.1/8")
    assert (wrong.code, wrong.error) == (
        2,
        'OUTBOX_ALLOW_NETWORKS: "127.0.0.1/8" has host bits set; did you mean 127.0.0.0/8?',
    )


INVALID_ENDPOINTS = (
    (["a", URL], 'endpoint "a" exists already; choose another name, or remove it first'),
    (["b", URL, "--type", "order."], "types: 'order.' is invalid"),
    (["b", URL, "--lanes", "0"], "lanes: must be between 1 and 1024, not 0"),
    (["b", URL, "--lanes", "x"], "'x' is not a valid integer"),
    (["b", URL, "--tenant", "t", "--all-tenants"], "for one tenant or for all, not both"),
    ([" ", URL], "name: must be printable text"),
)


def test_an_invalid_endpoint_is_rejected(here: Command, subtests: pytest.Subtests) -> None:
    assert here("endpoint", "add", "a", URL).code == 0
    for args, says in INVALID_ENDPOINTS:
        with subtests.test(args=args, says=says):
            result = here("endpoint", "add", *args)
            assert result.code == 2
            assert says in result.error


def test_endpoint_remove(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL, *ONE_LANE)
    here("endpoint", "add", "b", URL, *ONE_LANE)
    assert here("endpoint", "remove", "a").out == 'removed endpoint "a"\n'
    gone = here("endpoint", "remove", "a")
    assert (gone.code, gone.error) == (2, 'there is no endpoint "a"; see: outbox endpoint list')
    execute(database, "UPDATE lane_counter SET last_seq = 3")
    pending = here("endpoint", "remove", "b")
    assert pending.code == 2
    assert pending.error == (
        'endpoint "b" has 3 deliveries pending: wait until they are delivered, or '
        "dead-letter them (--wait, or --dead-letter)"
    )
    assert here("endpoint", "remove", "b", "--dead-letter").out == (
        'removing endpoint "b": the relay dead-letters its 3 deliveries; '
        "if no relay is running, the next one will\n"
    )
    taken = here("endpoint", "add", "b", URL, *ONE_LANE)
    assert (taken.code, taken.error) == (
        2,
        'endpoint "b" is being removed; its name is available when the removal is complete',
    )
    assert here("endpoint", "remove", "b", "--json").json["state"] == "removing"


# --------------------------------------------------------------------- dead


def test_dead_list(here: Command, database: Database) -> None:
    assert here("dead", "list").out == "no dead letters\n"
    assert here("dead", "list", "--json").json == []
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    one, whole = here("dead", "list", "--endpoint", "a", "--json").json
    assert list(one)[:14] == [
        "id", "endpoint", "lane", "sequence", "to_sequence",
        "event", "type", "key", "reason", "status", "failure", "excerpt", "attempts", "at",
    ]  # fmt: skip
    assert (one["sequence"], one["to_sequence"], one["status"]) == (7, 7, 410)
    assert (one["endpoint"], one["type"], one["reason"], one["attempts"]) == (
        "a",
        "a.b",
        "refused",
        3,
    )
    assert re.fullmatch(r"[0-9a-f]{12}-1-0", one["lane"])
    assert one["at"].endswith("Z")
    UUID(one["event"])
    assert (whole["sequence"], whole["to_sequence"], whole["event"]) == (10, 19, None)
    assert [r["id"] for r in here("dead", "list", "--json", "--limit", 1).json] == [one["id"]]
    assert here("dead", "list", "--limit", 1).err == (
        f"more rows exist; next page: --after {one['id']}\n"
    )
    after = here("dead", "list", "--json", "--after", one["id"]).json
    assert [r["id"] for r in after] == [whole["id"]]
    table = here("dead", "list").out
    assert " 10-19 " in table
    unknown = here("dead", "list", "--endpoint", "x")
    assert (unknown.code, unknown.error) == (
        2,
        'there is no endpoint "x"; see: outbox endpoint list',
    )


def test_dead_show(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    shown = here("dead", "show", 1, "--json").json
    assert shown["payload"] == {"n": 7}
    assert shown["headers"] == {"X-A": "b"}
    assert shown["last_response"] == {"status": 410, "body": "gone"}
    assert shown["replays"] == []
    text = here("dead", "show", 1).out
    assert 'payload        {"n": 7}' in text
    # What an application wrote does not steer the operator's terminal.
    assert "\x1b" not in text
    assert "key            k\\u001b[31m" in text
    replacement = "SET payload = NULL, body = '\\x00ff', content_type = 'image/png'"
    execute(database, f"UPDATE dead_letter {replacement} WHERE id = 1 RETURNING 1")
    assert "payload        2 bytes of image/png\n" in here("dead", "show", 1).out
    missing = here("dead", "show", 99)
    assert (missing.code, missing.error) == (2, "there is no dead letter 99; see: outbox dead list")


def test_dead_replay_and_discard(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    execute(database, "UPDATE endpoint SET state = 'disabled' RETURNING id")
    assert here("dead", "replay", "--endpoint", "a").out == (
        "replaying 0 dead letters\nskipped: 2 of disabled endpoints\n"
    )
    disabled = here("dead", "replay", 1)
    assert (disabled.code, disabled.error) == (
        2,
        'dead letter 1 belongs to the endpoint "a", which is disabled; '
        "enable it first: outbox endpoint enable a",
    )
    execute(database, "UPDATE endpoint SET state = 'active' RETURNING id")
    replayed = here("dead", "replay", 1, "--json").json
    assert replayed.pop("job") == execute(database, "SELECT id FROM replay_job")
    assert replayed == {
        "dry_run": False,
        "replaying": 1,
        "by_endpoint": {"a": 1},
        "skipped": {},
        "until": None,
    }
    assert re.search(
        r"^replayed       not yet, requested at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]",
        here("dead", "show", 1).out,
        re.MULTILINE,
    )
    every = here("dead", "list", "--state", "all").out.splitlines()
    assert [line.split()[:2] for line in every] == [
        ["ID", "STATE"], ["1", "replaying"], ["2", "dead"],
    ]  # fmt: skip
    assert "STATE" not in here("dead", "list").out
    assert [r["state"] for r in here("dead", "list", "--state", "all", "--json").json] == [
        "replaying",
        "dead",
    ]
    twice = here("dead", "replay", 1)
    assert (twice.code, twice.error) == (
        2,
        "dead letter 1 is being replayed already; see: outbox dead show 1",
    )
    assert here("dead", "discard", 2, "--comment", "old").out == "discarded 1 dead letter\n"
    assert execute(database, "SELECT data ->> 'comment' FROM journal ORDER BY id DESC") == "old"
    assert re.search("@", execute(database, "SELECT actor FROM journal ORDER BY id DESC"))


def test_a_range_is_replayed_in_chunks(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    replayed = here("dead", "replay", 2).out
    assert re.fullmatch(r"replaying 1 dead letter \(replay job \d+\)\n", replayed)
    execute(
        database,
        """
        INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, replay_id, replay_seq)
        SELECT l.id, 1, n, 1, r.id, 9 + n
          FROM replay r, lane l, generate_series(1, 4) n;
        UPDATE replay SET next_seq = 14 RETURNING id
        """,
    )
    assert "replayed       4 of 10 deliveries, requested at " in here("dead", "show", 2).out
    shown = here("dead", "show", 2, "--json").json
    assert (shown["state"], shown["replays"][0]["taken"]) == ("replaying", 4)
    assert (shown["replays"][0]["lane"], shown["replays"][0]["sequence"]) == (None, None)
    execute(
        database,
        """
        UPDATE replay SET next_seq = 20;
        UPDATE lane_progress SET acked_seq = 4 RETURNING lane_id
        """,
    )
    again = here("dead", "replay", 2)
    assert again.error == "dead letter 2 was replayed; see: outbox dead show 2"


@pytest.mark.full
def test_dead_letters_are_filtered(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    assert [r["id"] for r in here("dead", "list", "--type", "a.*", "--json").json] == [1]
    assert [r["id"] for r in here("dead", "list", "--reason", "removed", "--json").json] == [2]
    assert here("dead", "list", "--until", "1h").out == "no dead letters\n"
    assert len(here("dead", "list", "--since", "1h", "--json").json) == 2
    assert here("dead", "list", "--tenant", "x").out == "no dead letters\n"
    rows = [line.split() for line in here("dead", "count").out.splitlines()]
    assert rows == [
        ["ENDPOINT", "REASON", "DEAD", "REPLAYING", "REPLAYED", "DEAD_AGAIN", "DISCARDED"],
        ["a", "refused", "1", "0", "0", "0", "0"],
        ["a", "removed", "1", "0", "0", "0", "0"],
        ["all", "2", "0", "0", "0", "0"],
    ]
    counted = here("dead", "count", "--reason", "removed", "--json").json
    assert counted["total"] == {
        "dead": 1, "replaying": 0, "replayed": 0, "dead_again": 0, "discarded": 0,
    }  # fmt: skip
    assert counted["counts"][0]["numbers"] == 10
    for args, says in (
        (("--since", "yesterday"), "is neither a time such as 2026-01-31T12:00Z nor an age"),
        (("--since", "1h", "--until", "2h"), "until must be later than since"),
        (("--type", "a b"), "type pattern: 'a b' is invalid"),
        (("--reason", "tired"), "'tired' is not one of 'refused'"),
    ):
        wrong = here("dead", "list", *args)
        assert wrong.code == 2
        assert says in wrong.error


def test_a_dry_run_changes_nothing(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    before = execute(database, "SELECT array_agg(d::text ORDER BY id) FROM dead_letter d")
    planned = here("dead", "replay", "--all", "--dry-run", "--json").json
    assert planned == {
        "dry_run": True,
        "replaying": 2,
        "by_endpoint": {"a": 2},
        "skipped": {},
        "job": None,
        "until": planned["until"],
    }
    # The time of the count is an option of the same command.
    here("endpoint", "add", "b", URL)
    add_dead_letters(database, "b")
    then = here("dead", "replay", "--until", planned["until"], "--dry-run")
    assert then.out == "would replay 2 dead letters; nothing was changed\n"
    before = execute(database, "SELECT array_agg(d::text ORDER BY id) FROM dead_letter d")
    assert here("dead", "replay", 1, "--dry-run").out == (
        "would replay 1 dead letter; nothing was changed\n"
    )
    assert here("dead", "discard", "--endpoint", "a", "--reason", "refused", "--dry-run").out == (
        "would discard 1 dead letter; nothing was changed\n"
    )
    planned = here("replay", "--endpoint", "a", "--since", "1h", "--dry-run", "--json").json
    assert (planned["dry_run"], planned["deliveries"]) == (True, 0)
    after = execute(database, "SELECT array_agg(d::text ORDER BY id) FROM dead_letter d")
    assert after == before
    assert execute(database, "SELECT count(*) FROM replay_job") == 0


def test_a_replay_job_is_listed_shown_and_aborted(here: Command, database: Database) -> None:
    assert here("replay", "list").out == "no replay jobs\n"
    assert here("replay", "list", "--state", "running").out == "no running replay jobs\n"
    here("endpoint", "add", "a", URL)
    add_dead_letters(database, "a")
    replayed = here("dead", "replay", "--endpoint", "a", "--rate", 5).out
    first = execute(database, "SELECT id FROM replay_job")
    assert replayed == f"replaying 2 dead letters (replay job {first})\n"
    began = here("replay", "--endpoint", "a", "--since", "2020-01-01", "--type", "a.*", "--json")
    second = began.json["id"]
    assert (second > first, began.json["state"]) == (True, "running")
    listed = here("replay", "list").out.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        [str(second), "history", "running"],
        [str(first), "dead", "running"],
    ]
    assert "--endpoint a --type a.* --since 2020-01-01T00:00:00" in listed[1]
    shown = here("replay", "show", first, "--json").json
    assert (shown["all"], shown["done"], shown["rate_per_s"]) == (11, 0, 5.0)
    text = here("replay", "show", first).out
    assert re.search(r"^done +0%: 0 of 11 dead-lettered deliveries$", text, re.MULTILINE)
    assert re.search(r"^rate +5/s$", text, re.MULTILINE)
    aborted = here("replay", "abort", first).out
    assert aborted == f"aborted replay job {first} after 0 deliveries\n"
    again = here("replay", "abort", first)
    assert (again.code, again.error) == (
        2,
        f"replay job {first} was aborted already; see: outbox replay show {first}",
    )
    running = here("replay", "list", "--state", "running", "--json").json
    assert [r["id"] for r in running] == [second]
    more = f"more rows exist; next page: --after {second}\n"
    assert here("replay", "list", "--limit", 1).err == more
    assert [r["id"] for r in here("replay", "list", "--after", second, "--json").json] == [first]
    assert len(here("dead", "list", "--json").json) == 2
    unsaid = here("replay")
    assert unsaid.code == 2
    assert (
        "give --endpoint NAME and one of --since TIME, --event ID or --key KEY; or a command"
        in unsaid.error
    )
    unknown = here("replay", "--endpoint", "x", "--since", "1h")
    assert unknown.error == 'there is no endpoint "x"; see: outbox endpoint list'


def test_a_waiting_command_reports_the_result(here: Command, database: Database) -> None:
    """The test ends the job as a relay does that finds no delivery to replay."""
    here("endpoint", "add", "a", URL)
    execute(database, "ALTER TABLE replay_job ALTER state SET DEFAULT 'done'; SELECT 1")
    ended = here("replay", "--endpoint", "a", "--since", "1h", "--wait")
    assert ended.code == 0
    assert re.fullmatch(r"replay job \d+ is done: 0 deliveries", ended.out.splitlines()[-1])
    waited = here("replay", "--endpoint", "a", "--since", "1h", "--wait", "--json")
    assert waited.json["state"] == "done"


# ------------------------------------------------------------------- status


def test_status(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL, *ONE_LANE)
    here("publish", "a.b")
    seen = here("status", "--json").json
    assert list(seen) == [
        "schema", "at", "cursor", "blocker", "stopped", "open_gaps", "held",
        "unaccounted_events", "replicas", "missed", "feeds", "compat", "pending",
        "sequenced", "endpoints_total", "endpoints", "dead_letters",
        "dead_letters_of_removed",
    ]  # fmt: skip
    assert (seen["cursor"]["high"], seen["cursor"]["last_id"], seen["cursor"]["lag"]) == (0, 1, 1)
    assert [e["name"] for e in seen["endpoints"]] == ["a"]
    text = here("status").out
    assert "none alive; start one: outbox relay" in text
    assert "up to id 0 of 1, oldest event waiting for" in text
    execute(
        database,
        """
        UPDATE lane_counter SET last_seq = 2;
        UPDATE lane_progress SET retry_seq = 1, attempts = 3, spent = 3, next_attempt_at = now(),
               last_response = '{"failure": "timeout"}';
        INSERT INTO replica (name, version, label, lease_s, expires_at)
        VALUES ('r1', '1', 'outbox-relay:r1', 3600, now() + interval '1 hour') RETURNING id
        """,
    )
    text = here("status").out
    assert "1 alive" in text
    assert "after 3 attempts: no response in time" in text, "no relay owns it"
    assert re.search(r"^a +degraded \(1 of 1 lanes\) +2 ", text, re.MULTILINE)
    assert "outbox dead skip" not in text, "it may be a short outage"
    execute(
        database,
        "UPDATE ownership SET replica_id = (SELECT id FROM replica) RETURNING endpoint_id",
    )
    assert re.search(
        r"after 3 attempts, next at \d\d:\d\d:\d\d: no response in time", here("status").out
    )
    sql = "UPDATE lane_progress SET attempts = 59; UPDATE endpoint_health SET state = 'failing'"
    execute(database, sql)
    text = here("status").out
    assert "after 3 attempts and 56 probes, which do not count: no response in time" in text
    assert "to hold its deliveries until its receiver works: outbox endpoint pause a\n" in text
    assert "outbox dead skip" not in text, "the next delivery would fail as well"
    execute(database, """UPDATE lane_progress SET last_response = '{"status": 500}'""")
    lane = execute(database, "SELECT lane_name(endpoint_id, generation, slot) FROM lane")
    text = here("status").out
    assert f"to skip it: outbox dead skip a --lane {lane} --sequence 1; or, if its" in text
    assert "its lanes are probed in rotation, at most every second at first, later at" in text
    shown = here("endpoint", "show", "a").out
    assert re.search(r"59 \(56 probes\) +-", shown), "it is not its own time that decides"
    assert re.search(r"health +failing since .*; its lanes are probed in rotation", shown)
    held = "UPDATE endpoint_health SET held_until = now() + interval '1 h'"
    execute(database, held)
    assert "tried in turn" not in here("status").out
    execute(database, "UPDATE endpoint_health SET held_until = NULL")
    execute(database, "UPDATE endpoint SET state = 'paused'")
    assert "tried in turn" not in here("status").out, "a paused endpoint gets no attempts"
    here("endpoint", "add", "b", URL, *ONE_LANE)
    assert "and 1 endpoint more; see: outbox endpoint list" in here("status", "--limit", 1).out


def test_every_listing_shows_the_same_endpoint_values(here: Command, database: Database) -> None:
    """A blocked lane is shown although the circuit breaker of its endpoint is closed."""
    names = ("blocked", "failing", "healthy", "paused")
    for name in names:
        here("endpoint", "add", name, URL)
    execute(
        database,
        """
        INSERT INTO lane_block (lane_id, seq)
        SELECT l.id, 1 FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
         WHERE e.name IN ('blocked', 'paused');
        UPDATE endpoint SET state = 'paused' WHERE name = 'paused';
        UPDATE endpoint_health h SET state = 'failing' FROM endpoint e
         WHERE e.id = h.endpoint_id AND e.name = 'failing'
        """,
    )
    for listing in (
        here("status", "--json").json["endpoints"],
        here("endpoint", "list", "--json").json,
        [here("endpoint", "show", name, "--json").json["endpoint"] for name in names],
    ):
        assert {each["name"]: each["condition"] for each in listing} == {n: n for n in names}
    assert [line.split()[1] for line in here("status").out.split("\n\n")[1].splitlines()[1:]] == [
        *names
    ]


def test_status_shows_when_the_timeline_changed(here: Command, database: Database) -> None:
    assert "timeline" not in here("status").out
    execute(database, "UPDATE cursor SET timeline = 2, timeline_at = now() - interval '1 minute'")
    assert re.search(r"^timeline +2 since \S+, with new lanes$", here("status").out, re.MULTILINE)
    seen = here("status", "--json").json["cursor"]
    assert (seen["timeline"], seen["timeline_at"] is None) == (2, False)


def test_rolled_back_ids_are_not_lag(here: Command, database: Database) -> None:
    execute(database, "SELECT nextval('outbox_id_seq')")
    seen = here("status", "--json").json["cursor"]
    assert (seen["last_id"], seen["lag"], seen["waiting_s"]) == (1, 0, None)
    assert "sequenced     up to id 0, no event waiting\n" in here("status").out


def test_status_names_problems_and_the_commands_that_resolve_them(
    here: Command, database: Database
) -> None:
    for name in ("a shop", "blocked", "sick"):
        here("endpoint", "add", name, URL, *ONE_LANE)
    add_dead_letters(database, "blocked")
    execute(
        database,
        """
        UPDATE endpoint SET state = 'paused', state_at = now() - interval '2 h',
               state_by = 'ann@host', state_comment = 'moving' WHERE name = 'a shop';
        INSERT INTO lane_block (lane_id, seq, at)
        SELECT l.id, 7, now() - interval '5 min' FROM lane l JOIN endpoint e
            ON e.id = l.endpoint_id WHERE e.name = 'blocked';
        INSERT INTO endpoint_health (endpoint_id, state, since, held_until)
        SELECT id, 'failing', now() - interval '1 h', now() + interval '1 h'
          FROM endpoint WHERE name = 'sick' ON CONFLICT (endpoint_id) DO UPDATE
           SET state = 'failing', since = excluded.since, held_until = excluded.held_until;
        UPDATE lane_counter c SET last_seq = 9 FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
         WHERE l.id = c.lane_id AND e.name = 'sick';
        UPDATE endpoint SET generation = 2 WHERE name = 'sick';
        INSERT INTO replica (name, version, label, lease_s, expires_at)
        VALUES ('r1', '1', 'outbox-relay:r1', 3600, now() + interval '1 h'),
               ('r2', '1', 'outbox-relay:r2', 5, now() - interval '1 h') RETURNING id;
        UPDATE cursor SET writer = (SELECT id FROM replica WHERE name = 'r1')
        """,
    )
    text = here("status").out
    states = dict(re.findall(r"^(a shop|blocked|sick) +(\w+)", text, re.MULTILINE))
    assert states == {"a shop": "paused", "blocked": "blocked", "sick": "failing"}
    assert re.findall(r"^r\d .*?(?=  1 )", text, re.MULTILINE) == [
        "r1     alive   yes                0",
        "r2     lapsed  -                  0",
    ]
    for note in (
        "a shop: paused since 2h by ann@host (moving); outbox endpoint resume 'a shop'\n",
        "blocked: 1 lane blocked, one since 5m by sequence 7; outbox dead replay 1, outbox dead "
        "discard 1 or outbox endpoint resume blocked\n",
        "sick: failing since 1h\n",
        "sick: on hold until ",
        "sick: 1 lane of an older generation with 9 pending deliveries; the new lanes wait for "
        "them\n",
    ):
        assert re.sub(r"(\d[hm]) \ds", r"\1", text).count(note) == 1, (note, text)
    by_name = {e["name"]: e for e in here("status", "--json").json["endpoints"]}
    assert by_name["blocked"]["block"]["dead_letter"] == 1
    assert by_name["sick"]["health"]["state"] == "failing"
    assert (by_name["sick"]["old_lanes"], by_name["sick"]["old_pending"]) == (1, 9)
    assert by_name["a shop"]["state_by"] == "ann@host"


# ----------------------------------------------------------------- terminal


def test_a_terminal_gets_a_table_and_no_color_is_honoured(
    here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("endpoint", "add", "a", URL)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = here("endpoint", "list")
    assert "\x1b[" in coloured.out
    assert "dead letters" in coloured.out
    plain = here("endpoint", "list", NO_COLOR="1")
    assert not re.search(r"\x1b\[3[0-9]", plain.out)
    assert "\x1b" not in here("endpoint", "show", "a", NO_COLOR="1").out.partition("\n\n")[0]


def test_a_narrow_terminal_breaks_no_word(
    here: Command, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("endpoint", "add", "a-name-of-twenty-chars", URL)
    add_dead_letters(database, "a-name-of-twenty-chars")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    wide = here(
        "dead", "list", NO_COLOR="1", COLUMNS="140", LINES="25", TERM="dumb"
    ).out.splitlines()
    narrow = here(
        "dead", "list", NO_COLOR="1", COLUMNS="80", LINES="25", TERM="dumb"
    ).out.splitlines()
    assert len(wide) == 3
    assert wide[0].split() == [
        "id", "endpoint", "lane", "sequence", "type", "reason", "status", "attempts", "at",
    ]  # fmt: skip
    assert narrow[0].split() == ["id", "endpoint", "sequence", "type", "reason", "at"]
    assert max(map(len, narrow)) <= 80
    # Nothing is folded, and what is left out is named.
    assert len(narrow) == 4
    assert "refused" in narrow[1]
    assert narrow[3] == "not shown at this width: lane, status, attempts"
