"""Authentication, authorization and limits of API requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from structlog.testing import capture_logs
from yarl import URL

from outbox.core.model.text import count as count_of
from outbox.errors import CannotRun
from outbox.operations import status
from outbox.operations.events import erase
from outbox.operations.tokens import api as api_tokens
from outbox.web import loopback_hosts
from outbox.web.address import Address
from outbox.web.serving import listen
from outbox.web.serving import serving as listening
from outbox_api import login_failures, logins
from outbox_api.app import application
from outbox_api.database import Database as Connections
from outbox_api.limits import LONG_MAX, PAYLOAD_BODY_BYTES_MAX, REQUESTS_MAX
from outbox_api.login_failures import FailedLogins
from outbox_api.problem import DATABASE_UNAVAILABLE, SCHEMA_MISSING
from outbox_api.shared import Shared
from tests.support.api import Api, make_token, serving
from tests.support.broken_requests import send_each
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.relay import current, fetchval, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.support.api import AttemptResult
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

UNKNOWN_TOKEN = "obx_" + "A" * 43


BAD_TOKENS = (
    (None, "send Authorization: Bearer TOKEN"),
    ("Basic dXNlcjpwYXNz", "malformed token"),
    ("Bearer secret", "malformed token"),
    ("Bearer " + UNKNOWN_TOKEN + "A", "malformed token"),
    ("Bearer " + UNKNOWN_TOKEN, "the token is unknown"),
)


@pytest.mark.slow
async def test_a_request_without_a_valid_token_is_rejected(
    client: Api, subtests: pytest.Subtests
) -> None:
    for header, says in BAD_TOKENS:
        with subtests.test(header=header, says=says):
            headers = {} if header is None else {"Authorization": header}
            response = await client.request("GET", "/v1/me", headers=headers)
            assert response.status == 401
            assert says in response.detail
            assert response.headers["WWW-Authenticate"].startswith('Bearer realm="outbox"')


async def test_me_shows_the_scopes_of_the_token(database: Database, client: Api) -> None:
    secret = await make_token(
        database, "ops", ("operate", "read"), tenant="acme", expires_in_s=3600.0
    )
    me = (await client.with_token(secret).get("/v1/me")).json
    assert me["expires_at"] is not None
    del me["expires_at"]
    assert me == {
        "name": "ops",
        "scopes": ["read", "operate"],
        "tenant": "acme",
        "schema": "relay",
    }


@pytest.mark.slow
async def test_an_expired_token_is_rejected(database: Database, client: Api) -> None:
    secret = await make_token(database, expires_in_s=60.0)
    await fetchval(database, "UPDATE token SET expires_at = now() - interval '1 s' RETURNING id")
    response = await client.with_token(secret).get("/v1/me")
    assert response.status == 401
    assert "has expired" in response.detail


async def test_a_revoked_token_is_rejected_when_the_cache_expires(database: Database) -> None:
    now = 100.0
    settings = settings_for(database, dsn_source="test")
    connections = Connections(current(settings))
    failed = FailedLogins(connections)
    app = application(
        settings, Address("127.0.0.1", 0), connections, failed, Shared(), clock=lambda: now
    )
    secret = await make_token(database, "gone")
    async with (
        connections.opened(),
        listening(app, await listen(Address("127.0.0.1", 0))) as at,
        aiohttp.ClientSession() as session,
    ):
        api = Api(session, at.url, secret)
        assert (await api.get("/v1/me")).status == 200
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await api_tokens.revoke_token(db, "relay", "gone", actor="test")
        now += logins.KEPT_S - 0.1
        assert (await api.get("/v1/me")).status == 200
        now += 0.1
        response = await api.get("/v1/me")
        assert response.status == 401
        assert "was revoked" in response.detail


@pytest.mark.full
async def test_the_last_use_of_a_token_is_written_once_a_minute(
    database: Database, client: Api
) -> None:
    secret = await make_token(database)
    api = client.with_token(secret)
    used = "SELECT last_used_at FROM token"
    assert await fetchval(database, used) is None
    await api.get("/v1/me")
    first = await fetchval(database, used)
    assert first is not None
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await api_tokens.find_token(db, "relay", secret)
        assert await fetchval(database, used) == first
        await db.execute("UPDATE token SET last_used_at = now() - interval '61 s'")
        await api_tokens.find_token(db, "relay", secret)
    assert await fetchval(database, used) >= first


@pytest.mark.slow
async def test_failed_logins_are_one_journal_entry(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_failures, "LAST_WRITE_S", 30.0)
    rows = "SELECT data FROM journal WHERE kind = 'logins_failed' ORDER BY id"
    async with serving(database) as api:
        await api.get("/v1/me")
        await until(lambda: fetchval(database, rows), what="the first row")
        guesses = [api.with_token(f"obx_{n:043}").get("/v1/me") for n in range(50)]
        assert {response.status for response in await asyncio.gather(*guesses)} == {401, 429}
        count = "SELECT count(*) FROM journal WHERE kind = 'logins_failed'"
        assert await fetchval(database, count) == 1
    # When the server ends, what is left is written.
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        first, second = [row["data"] for row in await db.fetch(rows)]
    assert '"attempts": 1' in first
    assert '"attempts": 50' in second
    assert '"127.0.0.1": 50' in second
    assert '"the token is unknown": 10' in second
    assert '"too many failed logins from this address": 40' in second


async def test_failed_logins_name_a_few_addresses_and_count_the_others(database: Database) -> None:
    settings = settings_for(database, dsn_source="test")
    connections = Connections(current(settings))
    failed = FailedLogins(connections)
    for n in range(100):
        failed.record_failure(f"10.0.0.{n}", "the token is unknown")
    async with connections.opened():
        writing = asyncio.ensure_future(failed.run())
        sql = "SELECT data -> 'addresses' ->> 'others' FROM journal"
        others = await until(lambda: fetchval(database, sql), what="the row")
        writing.cancel()
        await asyncio.wait([writing])
    assert int(others) == 100 - login_failures.REPORTED_ADDRESSES_MAX


async def test_a_lock_held_by_another_transaction_is_a_503(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def held(connection: Any, _: str) -> None:
        async with connection.transaction():
            await connection.execute("SET LOCAL lock_timeout = 1")
            await connection.execute("LOCK TABLE future_event IN ACCESS EXCLUSIVE MODE")

    monkeypatch.setattr(status, "list_replicas", held)
    async with database.connection() as db, db.transaction():
        await db.execute("LOCK TABLE relay.future_event IN ACCESS SHARE MODE")
        response = await api.get("/v1/replicas")
    assert response.status == 503
    assert "held by another transaction" in response.detail


# ---------------------------------------------------------------- requests


async def test_an_unknown_path_or_method_is_rejected(api: Api) -> None:
    response = await api.get("/v1/nothing")
    assert (response.status, response.json["type"]) == (404, "urn:outbox:problem:not-found")
    response = await api.request("PUT", "/v1/endpoints")
    assert response.status == 405
    assert response.headers["Allow"] == "GET, HEAD, POST"


UNREADABLE_BODIES = (
    (b'{"type": "a.b",', "application/json", 400, "line 1, column 16"),
    (b"[]", "application/json", 422, "must be a JSON object"),
    (b'{"xyz": 1}', "application/json", 422, 'unknown field "xyz"; known: type'),
    (b'{"type": 7}', "application/json", 422, "type: must be a string"),
    (b"{}", "application/json", 422, "type: is required"),
    (b"{}", "text/plain", 415, "Content-Type: application/json"),
)


async def test_an_unreadable_body_is_rejected(api: Api, subtests: pytest.Subtests) -> None:
    for body, content_type, expected, says in UNREADABLE_BODIES:
        with subtests.test(body=body, content_type=content_type):
            response = await api.post(
                "/v1/events", data=body, headers={"Content-Type": content_type}
            )
            assert response.status == expected
            assert says in response.detail


async def test_a_compressed_body_is_rejected(api: Api) -> None:
    headers = {"Content-Encoding": "gzip"}
    response = await api.post("/v1/events", data=b"\x1f\x8b", headers=headers)
    assert response.status == 415
    head = (
        f"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.secret}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    )
    body = b'f\r\n{"type": "a.b"}\r\n0\r\n\r\n'
    at = URL(api.url)
    (raw,) = await send_each(at.host or "", at.port or 0, [head.encode() + body])
    assert raw.startswith(b"HTTP/1.1 415 ")


async def test_a_body_is_limited_with_and_without_content_length(api: Api) -> None:
    large = b" " * (PAYLOAD_BODY_BYTES_MAX + 1)
    response = await api.post("/v1/events", data=large)
    assert (response.status, response.detail) == (
        413,
        "the body is larger than 1048576 bytes, the limit of this route; "
        "split it, or use the command line",
    )

    async def chunks() -> Any:
        for _ in range(9):
            yield b" " * (1 << 17)

    headers = {"Authorization": f"Bearer {api.secret}", "Content-Type": "application/json"}
    async with api.session.post(api.url + "/v1/events", data=chunks(), headers=headers) as response:
        assert response.status == 413
        assert (await response.json(content_type=None))["type"] == "urn:outbox:problem:too-large"


async def test_a_body_of_the_maximum_size_is_read(api: Api) -> None:
    # A payload of 256 KiB with all its text escaped.
    payload = b'"' + b"\\u00e9" * (256 * 1024 // 2 - 1) + b'"'
    response = await api.post("/v1/events", data=b'{"type": "a.b", "payload": ' + payload + b"}")
    assert response.status == 201


WRONG_QUERIES = (
    ({"limit": 0}, "limit: must be at least 1"),
    ({"limit": 1001}, "limit: must be at most 1000"),
    ({"limit": [1, 2]}, "limit: given 2 times; give it once"),
    ({"depth": 1}, 'unknown field "depth"; known: limit, after'),
)


async def test_an_invalid_query_is_rejected(api: Api, subtests: pytest.Subtests) -> None:
    for query, says in WRONG_QUERIES:
        with subtests.test(query=query, says=says):
            response = await api.get("/v1/endpoints", **query)
            assert response.status == 422
            assert says in response.detail


WRONG_CURSORS = (
    "x",
    "-1",
    "9" * 30,
    "0" * 19 + "9" * 20,
    "0" * 20 + "9" * 5000,
    "1.5",
    "\u0661",
)


async def test_a_cursor_that_no_page_returned_is_rejected(
    api: Api, subtests: pytest.Subtests
) -> None:
    for cursor in WRONG_CURSORS:
        with subtests.test(cursor=cursor):
            for path in (
                "/v1/dead-letters",
                "/v1/events",
                "/v1/replays",
                "/v1/journal",
                "/v1/tokens",
            ):
                response = await api.get(path, after=cursor)
                assert (response.status, response.json["type"]) == (
                    400,
                    "urn:outbox:problem:bad-request",
                ), path


WRONG_NUMBERS = (
    "0" * 19 + "1" + "9" * 20,
    "0" * 20 + "9" * 5000,
    "%C2%B2",
)


async def test_an_id_without_a_row_is_not_found(api: Api, subtests: pytest.Subtests) -> None:
    for number in WRONG_NUMBERS:
        with subtests.test(number=number):
            for path in ("/v1/dead-letters", "/v1/replays"):
                assert (await api.get(f"{path}/{number}")).status == 404, path


async def test_text_that_postgresql_cannot_store_is_rejected(api: Api) -> None:
    for path in ("/v1/endpoints/a%00b", "/v1/once/%00", "/v1/trace/%00"):
        assert (await api.get(path)).status == 400, path
    assert (await api.get("/v1/events", key="a\0b")).status == 400


async def test_an_internal_error_is_logged_and_not_shown(
    database: Database, monkeypatch: pytest.MonkeyPatch, logs: list[MutableMapping[str, Any]]
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the secret reason")

    monkeypatch.setattr(status, "list_replicas", broken)
    secret = await make_token(database)
    async with serving(database) as client:
        response = await client.with_token(secret).get("/v1/replicas")
    assert response.status == 500
    assert b"secret reason" not in response.raw
    (entry,) = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert entry["error_id"] in response.detail
    assert entry["route"] == "/v1/replicas"


# -------------------------------------------------------------------- hosts


HOSTS = (
    ("localhost", 200),
    ("LOCALHOST:80", 200),
    ("127.0.0.1:8080", 200),
    ("[::1]:8080", 200),
    ("evil.example", 421),
    ("localhost.evil.example", 421),
    ("10.0.0.1", 421),
    ("", 421),
    ("a:b:c", 421),
    # Parts of a URL around a valid name.
    ("evil@localhost", 421),
    ("localhost#.evil.example", 421),
    ("localhost/.evil.example", 421),
    ("localhost?evil.example", 421),
    ("localhost..", 421),
    ("[127.0.0.1]", 421),
    ("[::1%25lo]", 421),
    ("localhost:80:80", 421),
)


async def test_a_loopback_listener_accepts_only_loopback_host_names(
    client: Api, subtests: pytest.Subtests
) -> None:
    for host, expected in HOSTS:
        with subtests.test(host=host):
            response = await client.request("GET", "/openapi.json", headers={"Host": host})
            assert response.status == expected


@pytest.mark.full
async def test_another_listener_accepts_any_host_name_and_warns_once(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    assert not loopback_hosts.is_loopback("0.0.0.0")  # noqa: S104 (nothing listens)
    async with serving(database, admin="0.0.0.0:0") as api:
        url = api.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 (asked by another way)
        api = Api(api.session, url, None)
        for _ in range(2):
            response = await api.request("GET", "/openapi.json", headers={"Host": "outbox.example"})
            assert response.status == 200
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert ["put a TLS proxy in front" in entry["event"] for entry in warnings] == [True]


# ------------------------------------------------------------- the database


@pytest.mark.slow
async def test_requests_get_503_while_the_database_is_unavailable(
    private_database: Database,
) -> None:
    database = private_database
    secret = await make_token(database)
    async with serving(database) as client:
        api = client.with_token(secret)
        assert (await api.get("/v1/status")).status == 200
        await asyncio.to_thread(database.server.embedded.halt, immediate=True)
        with capture_logs() as logs:
            for n in range(6):
                # The response is the same with a valid token and with an unknown one.
                response = await (api if n % 2 else client.with_token(UNKNOWN_TOKEN)).get(
                    "/v1/status"
                )
                assert response.json["type"] == "urn:outbox:problem:unavailable"
                assert (response.status, response.detail) == (503, DATABASE_UNAVAILABLE)
                assert "Retry-After" in response.headers
            # These responses do not need the database.
            assert (await api.get("/openapi.json")).status == 200
            await asyncio.to_thread(database.server.embedded.start)
            await until(lambda: _statuses(api), what="the API to go on")
        reported = [each for each in logs if each["event"].startswith("the database")]
        assert reported[-1]["event"] == "the database is available again"
        reasons = [each["reason"] for each in reported[:-1]]
        assert database.server.embedded.socket_dir.name in reasons[-1]
        # Once for each reason, and not for each who asked.
        assert len(reasons) == len(set(reasons)) < 4


async def _statuses(api: Api) -> bool:
    return (await api.get("/v1/status")).status == 200


async def test_requests_get_503_until_an_older_schema_is_migrated(empty_database: Database) -> None:
    async with serving(empty_database) as client:
        response = await client.with_token(UNKNOWN_TOKEN).get("/v1/me")
        assert (response.status, response.detail) == (503, SCHEMA_MISSING)


async def test_the_pool_has_at_most_five_connections_and_releases_them(
    database: Database, api: Api
) -> None:
    responses = await asyncio.gather(*(api.get("/v1/status") for _ in range(40)))
    assert {response.status for response in responses} == {200}
    sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-admin'"
    assert 1 <= await fetchval(database, sql) <= 5


async def test_slow_requests_leave_connections_for_others(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    count = erase.count_erasable
    at_work = 0

    async def slow(*arguments: Any) -> Any:
        nonlocal at_work
        at_work += 1
        await gate.wait()
        return await count(*arguments)

    monkeypatch.setattr(erase, "count_erasable", slow)
    erasing: list[asyncio.Task[AttemptResult]] = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            asked = api.post("/v1/erase", {"tenant": "acme", "dry_run": True})
            erasing.append(tasks.create_task(asked))
        await until(lambda: at_work == LONG_MAX, what="as many as may to be at work")
        newcomer = api.with_token(await make_token(database, "new"))
        assert (await newcomer.get("/v1/status")).status == 200
        with monkeypatch.context() as hurry:
            hurry.setattr("outbox_api.database.CONNECTION_WAIT_S", 0.01)
            refused = await newcomer.post("/v1/erase", {"tenant": "acme", "dry_run": True})
        assert (refused.status, at_work) == (503, LONG_MAX)
        assert (
            refused.detail
            == f"{count_of(LONG_MAX, 'long request')} already running; try again later"
        )
        gate.set()
    assert {task.result().status for task in erasing} == {200}


async def test_a_token_is_authenticated_while_all_other_connections_are_busy(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    at_work = 0

    async def slow(*_: Any) -> tuple[()]:
        nonlocal at_work
        at_work += 1
        await gate.wait()
        return ()

    monkeypatch.setattr(status, "list_replicas", slow)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(api.get("/v1/replicas"))
        await until(lambda: at_work == REQUESTS_MAX, what="all connections to be busy")
        assert (await api.with_token(UNKNOWN_TOKEN).get("/v1/me")).status == 401
        newcomer = api.with_token(await make_token(database, "new", ("read",)))
        assert (await newcomer.get("/v1/me")).json["scopes"] == ["read"]
        gate.set()


async def test_a_statement_that_takes_too_long_is_cancelled(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(connection: Any, schema: str) -> Any:
        await connection.execute("SET LOCAL statement_timeout = 1")
        async with connection.transaction():
            await connection.execute("SET LOCAL statement_timeout = 10")
            await connection.execute("SELECT pg_sleep(60)")

    monkeypatch.setattr(status, "list_replicas", slow)
    response = await api.get("/v1/replicas")
    assert response.status == 503
    assert "query timed out" in response.detail


async def test_sessions_have_time_outs(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(database, dsn_source="test")
    connections = Connections(current(settings))
    async with connections.opened(), connections.connection() as db:
        assert await db.fetchval("SHOW statement_timeout") == "30s"
        assert await db.fetchval("SHOW lock_timeout") == "10s"
        assert await db.fetchval("SHOW application_name") == "outbox-admin"


async def test_an_address_in_use_is_reported_before_the_start(database: Database) -> None:
    async with serving(database) as api:
        port = int(api.url.rpartition(":")[2])
        with pytest.raises(CannotRun, match="choose another"):
            async with serving(database, admin=f"127.0.0.1:{port}"):
                pass


async def test_a_request_succeeds_although_its_connection_cannot_be_reset(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any, **__: Any) -> None:
        raise TimeoutError

    assert (await api.get("/v1/me")).status == 200
    monkeypatch.setattr("asyncpg.connection.Connection.reset", lost)
    response = await api.post("/v1/events", {"type": "a.b"})
    assert response.status == 201
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 1
    monkeypatch.undo()
    assert (await api.post("/v1/events", {"type": "a.b"})).status == 201


@pytest.mark.full
@pytest.mark.pgbouncer
async def test_the_api_works_behind_a_transaction_pooler(
    database: Database,
) -> None:
    await find_the_schema(database)
    secret = await make_token(database)
    async with (
        pgbouncer(database, pool_size=2) as proxy,
        serving(database, dsn=proxy.dsn(), pooled=True) as client,
    ):
        api = client.with_token(secret)
        body = {"type": "a.b", "once": "k"}
        responses = await asyncio.gather(*(api.post("/v1/events", body) for _ in range(10)))
        assert sorted(response.status for response in responses) == [200] * 9 + [201]
        for path in ("/v1/status", "/v1/events", "/v1/trace/k", "/v1/dead-letters/counts"):
            assert (await api.get(path)).status == 200, path
        body = {"name": "shop", "url": "http://127.0.0.1:9/"}
        assert (await api.post("/v1/endpoints", body)).status == 201
        assert (await api.get("/v1/endpoints/shop")).status == 200
