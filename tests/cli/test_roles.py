"""Commands run by database roles with the privileges of one purpose."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from tests.support.relay import OK, REFUSED, Network, add_endpoint, all_ended, publish, running
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.commands import Command, Result
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

READING = (
    ("status",),
    ("verify",),
    ("trace", "k"),
    ("dead", "list"),
    ("dead", "show", "1"),
    ("dead", "count"),
    ("endpoint", "list"),
    ("endpoint", "show", "shop"),
    ("replay", "list", "--state", "all"),
    ("schedule", "list"),
    ("schedule", "show", "nightly"),
    ("journal",),
    ("once", "list"),
    ("once", "show", "o"),
    ("token", "list"),
    ("migrate", "--check"),
)

NEWEST_JOB = "newest"  # Stands for its id, which comes from the clock.
OPERATING = (
    ("endpoint", "add", "new", "https://receiver.test/", "--header", "X-A: b"),
    ("endpoint", "update", "new", "--lanes", "3", "--header", "X-A: c"),
    ("endpoint", "pause", "new", "--comment", "because"),
    ("endpoint", "resume", "new"),
    ("endpoint", "rotate-secret", "new", "--overlap", "0"),
    ("endpoint", "rotate-secret", "new"),
    ("endpoint", "fetch-token", "new"),
    ("endpoint", "fetch-token", "new", "--overlap", "0"),
    ("endpoint", "fetch-token", "new", "--revoke"),
    ("endpoint", "remove", "new", "--dead-letter"),
    ("dead", "replay", "1"),
    ("replay", "--endpoint", "shop", "--since", "1h"),
    ("replay", "abort", NEWEST_JOB),
    ("dead", "discard", "2"),
    ("schedule", "add", "weekly", "@weekly", "--type", "a.b"),
    ("schedule", "add", "weekly", "@monthly", "--type", "a.b", "--replace"),
    ("schedule", "pause", "weekly"),
    ("schedule", "resume", "weekly"),
    ("schedule", "run-now", "weekly"),
    ("schedule", "remove", "weekly"),
    ("once", "reset", "o"),
    ("token", "add", "ci", "--scope", "read"),
    ("token", "revoke", "ci"),
    ("erase", "--key", "k", "--yes"),
)


@pytest.fixture
def filled(database: Database) -> Database:
    """Create two dead letters, a schedule and an idempotency key."""

    async def query_database() -> None:
        await add_endpoint(
            database, headers={"X-Plain": "canary-header", "Authorization": "canary"}
        )
        async with running(database, Network(lambda s: REFUSED if s.seq < 3 else OK)):
            await publish(database, 1, 2, 3, key="k")
            await all_ended(database)
        async with database.connection() as owner:
            await owner.execute("SELECT relay.publish('a.b', '{}', once => 'o')")

    with capture_logs():
        asyncio.run(query_database())
    return database


@pytest.fixture
def as_role(outbox: Command, filled: Database) -> Iterator[Callable[..., Result]]:
    """Run a command as a role with a purpose."""
    loop = asyncio.new_event_loop()
    made: dict[str, Any] = {}

    def call(purpose: str, *words: str) -> Result:
        if purpose not in made:
            context = role(filled, purpose)
            made[purpose] = context, loop.run_until_complete(context.__aenter__())
        return outbox(*words, OUTBOX_DSN=dsn_of(filled, made[purpose][1]))

    owner = {"OUTBOX_DSN": filled.dsn}
    assert outbox("schedule", "add", "nightly", "@daily", "--type", "a.b", **owner).code == 0
    yield call
    for context, _ in made.values():
        loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


READING_PURPOSES = ("reader", "operator", "relay", "api")


@pytest.mark.slow
def test_a_read_role_sees_everything_but_secrets(
    as_role: Callable[..., Result], subtests: pytest.Subtests
) -> None:
    for purpose in READING_PURPOSES:
        with subtests.test(purpose=purpose):
            for words in READING:
                result = as_role(purpose, *words)
                assert result.code == 0, (words, result.err, result.out)
            unseen = [
                found["check"]
                for found in as_role(purpose, "doctor", "--no-probe", "--json").json["findings"]
                if found["message"].startswith("this check needs more rights")
            ]
            assert unseen == []
            shown = as_role(purpose, "endpoint", "show", "shop", "--json")
            headers = shown.json["settings"]["headers"]
            assert headers == {"X-Plain": None, "Authorization": None}


def test_an_operator_role_may_run_every_command(
    as_role: Callable[..., Result], tmp_path: Path
) -> None:
    for words in OPERATING:
        if NEWEST_JOB in words:
            jobs = as_role("operator", "replay", "list", "--state", "all", "--json").json
            newest = str(max(job["id"] for job in jobs))
            words = [newest if word == NEWEST_JOB else word for word in words]
        result = as_role("operator", *words)
        assert result.code == 0, (words, result.err, result.out)
    file = tmp_path / "endpoints.yaml"
    exported = as_role("operator", "endpoint", "export")
    file.write_text(exported.out.replace("X-Plain: null", "X-Plain: x").replace("http:", "https:"))
    assert as_role("operator", "apply", "--file", str(file)).code == 0
    assert as_role("operator", "verify").code == 0
    # That is a producer's.
    assert as_role("operator", "publish", "a.b").code == 3


@pytest.mark.full
@pytest.mark.one_major
def test_a_monitor_role_granted_as_the_doctor_says_sees_everything(
    outbox: Command, as_role: Callable[..., Result], filled: Database
) -> None:
    reported = " ".join(outbox("doctor", "--help").out.split())
    assert "`outbox migrate --reader ROLE` and `GRANT pg_monitor TO ROLE`" in reported

    async def grant() -> None:
        async with filled.connection() as owner:
            await owner.execute(f'GRANT pg_monitor TO "{filled.roles[0]}"')

    assert as_role("reader", "status").code == 0
    asyncio.run(grant())
    findings = as_role("reader", "doctor", "--json").json["findings"]
    assert [f for f in findings if "could not see" in f["message"]] == []
    assert [f["message"] for f in findings if "can read the secrets" in f["message"]] == []


@pytest.mark.full
@pytest.mark.one_major
def test_a_producer_role_is_not_advised_to_get_more_privileges(
    as_role: Callable[..., Result],
) -> None:
    refused = as_role("producer", "doctor")
    assert refused.code == 3
    assert refused.error == (
        "permission denied for table migration; this role is a producer; "
        "run it as a reader or an operator"
    )


@pytest.mark.one_major
def test_a_read_role_changes_nothing_and_gets_advice(
    as_role: Callable[..., Result],
) -> None:
    for words in OPERATING:
        result = as_role("reader", *words)
        assert result.code in (2, 3), words
        if result.code == 3:
            assert "permission denied" in result.error
            assert "(outbox migrate --operator ROLE)" in result.error, words
    exported = as_role("reader", "endpoint", "export")
    assert (exported.code, "(outbox migrate --operator ROLE)" in exported.error) == (3, True)


@pytest.mark.full
@pytest.mark.one_major
def test_the_owner_drops_emptied_partitions(
    outbox: Command, as_role: Callable[..., Result], filled: Database
) -> None:
    def execute(sql: str) -> None:
        async def executed() -> None:
            async with filled.connection() as owner:
                await owner.execute(sql)

        asyncio.run(executed())

    execute("""
        INSERT INTO relay.period (kind, number) VALUES ('events', 1);
        UPDATE relay.period SET dropped_at = now() WHERE kind = 'events' AND number = 0
    """)
    assert "dropped" not in as_role("relay", "migrate").out
    # Of a relay that ended during its maintenance.
    execute(
        "UPDATE relay.lock SET expires_at = now() + interval '1 min', token = gen_random_uuid()"
    )
    reported = outbox("migrate", OUTBOX_DSN=filled.dsn)
    assert "another session maintains the partitions" in reported.err
    assert "dropped" not in reported.out
    execute("UPDATE relay.lock SET expires_at = NULL, token = NULL")
    reported = outbox("migrate", OUTBOX_DSN=filled.dsn)
    assert reported.out.endswith("partitions of dropped periods: 1 dropped\n")
    assert "dropped" not in outbox("migrate", OUTBOX_DSN=filled.dsn).out


@pytest.mark.full
@pytest.mark.one_major
def test_a_producer_role_publishes_and_cannot_read(as_role: Callable[..., Result]) -> None:
    assert as_role("producer", "publish", "a.b", "--once", "p").code == 0
    for words in READING:
        assert as_role("producer", *words).code == 3, words
