"""Queries of the API use indexes and read few rows, however large the tables are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.api_token import (
    TokenSettings,
    digest,
    format_token,
    is_token,
    normalize_scopes,
)
from outbox.errors import UsageError
from outbox.operations import journal, tenancy
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.events import idempotency_keys
from outbox.operations.events.queries import PLAN_BY_ID
from outbox.operations.replays import jobs as replay_jobs
from outbox.operations.tokens import api as api_tokens
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from tests.support.plans import explain
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from tests.support.postgres import Database

FILL = """
INSERT INTO token (name, hash, scopes, created_by)
SELECT 't' || i, sha256(i::text::bytea), '{read}', 'test' FROM generate_series(1, 5000) i;
INSERT INTO endpoint (id, name, url, retry, lanes, tenant)
SELECT md5(i::text)::uuid, 'e' || i, 'http://a/', '{}', 1, 'tenant-' || i % 100
  FROM generate_series(1, 2000) i;
INSERT INTO journal (kind, actor, endpoint_id)
SELECT 'endpoint_updated', 'test', md5(CASE WHEN i % 2 = 0 THEN 1 ELSE i % 2000 + 1 END::text)::uuid
  FROM generate_series(1, 40000) i;
INSERT INTO idempotency_key (key, event_id, expires_at)
SELECT 'k' || i, gen_random_uuid(), now() + interval '1 d' FROM generate_series(1, 5000) i;
INSERT INTO schedule (name, cron, timezone, type, payload, tenant, misfire, grace_s, overlap,
                      next_at, due_at)
SELECT 's' || i, '@daily', 'UTC', 'a.b', '{}', 'tenant-1', 'once', 60, 'allow', now(), now()
  FROM generate_series(1, 5000) i;
INSERT INTO replay_job (kind, requested_by) SELECT 'dead', 'test' FROM generate_series(1, 5000);
INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, last_id)
SELECT i, md5((i % 2000 + 1)::text)::uuid, 1, 1, 1 FROM generate_series(1, 5000) i;
INSERT INTO lane (endpoint_id, generation, slot)
SELECT md5(i::text)::uuid, 1, 0 FROM generate_series(1, 2000) i;
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, tenant, reason,
                         attempts)
SELECT l.endpoint_id, l.id, 1, n, n, n, 'tenant-1', 'refused', 1
  FROM lane l, generate_series(1, 5) n;
"""


@pytest.fixture
async def db(database: Database) -> AsyncIterator[Connection[Any]]:
    connection = await connect(parse(database.dsn, source="test", env={}), schema="relay")
    await connection.execute(FILL)
    yield connection
    await connection.close()


@pytest.mark.parametrize("analyzed", sampled([False, True]))
async def test_authentication_uses_an_index(db: Connection[Any], analyzed: bool) -> None:
    if analyzed:
        await db.execute("ANALYZE")
    e1 = await db.fetchval("SELECT id FROM endpoint WHERE name = 'e1'")
    own = [row["id"] for row in await db.fetch("SELECT id FROM endpoint WHERE tenant='tenant-1'")]
    hash_ = await db.fetchval("SELECT hash FROM token WHERE name = 't77'")
    none = (*(None,) * 5, 0)  # Any entry, down to the first.
    cases: list[tuple[str, tuple[Any, ...], int]] = [
        (api_tokens.FIND_TOKEN, (hash_,), 2),
        (api_tokens.LIST_TOKENS, (4000, False, 101, None, None, None), 5000),
        (tenancy.COUNT_ENDPOINTS, ("tenant-1", ["e1"]), 20),  # Those of the tenant.
        (tenancy.OWNS_SCHEDULE, ("tenant-1", "s1"), 2),
        (tenancy.COUNT_DEAD_LETTERS, ("tenant-1", [1, 2, 3]), 20 + 10),
        (tenancy.OWNS_JOB, ("tenant-1", 1), 20 + 5),
        (idempotency_keys.FIND_EVENTS, (["k1", "k2"],), 4),
        (journal.LIST_ALL, (journal.ID_MAX, 101, *none), 101 + 2200),
        (journal.LIST_OF_ENDPOINTS, (journal.ID_MAX, 101, *none, [e1], True), 2200),
        (
            journal.LIST_OF_ENDPOINTS,
            (journal.ID_MAX, 101, *none, own, False),
            2000 + 20 * 101,
        ),
    ]
    for sql, arguments, rows_max in cases:
        for generic in (False, True):
            async with db.transaction():
                if "journal" in sql:
                    await db.execute(PLAN_BY_ID)
                plan = await explain(db, sql, *arguments, generic=generic)
            assert plan.rows <= rows_max, f"{sql}\n{plan}"


@pytest.mark.full
async def test_listings_of_a_tenant_read_only_its_rows(
    db: Connection[Any],
) -> None:
    await db.execute("ANALYZE")
    own = [row["id"] for row in await db.fetch("SELECT id FROM endpoint WHERE tenant='tenant-1'")]
    nothing = (None,) * 5
    plan = await explain(
        db,
        dead_letters.LIST_DEAD,
        0,
        ["dead"],
        own,
        101,
        ["dead"],
        *nothing,
        "tenant-1",
        generic=False,
    )
    assert plan.rows <= 10_000 + 3 * 2000, plan
    plan = await explain(db, replay_jobs.READ_JOBS, 0, 101, ["running"], "tenant-1", generic=False)
    assert plan.rows <= 40_000, plan


def test_a_token_is_256_random_bits_in_a_recognizable_form() -> None:
    secret = format_token(bytes(range(32)))
    assert secret == "obx_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert is_token(secret)
    assert not any(map(is_token, (secret[:-1], secret + "A", secret + "\n", secret[4:], "")))
    assert len(digest(secret)) == 32


def test_scopes_are_ordered_and_unique() -> None:
    assert normalize_scopes(["operate", "read", "read"]) == ("read", "operate")
    assert TokenSettings(name="a", scopes=("publish", "read")).scopes == ("read", "publish")  # type: ignore[arg-type]
    for wrong in ([], ["all"]):
        with pytest.raises(UsageError, match="scopes: "):
            normalize_scopes(wrong)
