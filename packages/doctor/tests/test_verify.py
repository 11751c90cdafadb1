"""`outbox verify` reports each guarantee that is violated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox_doctor.verify.audit import run_checks
from outbox_doctor.verify.guarantees import CHECKS
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.split_runs import split_runs

if TYPE_CHECKING:
    from tests.support.postgres import Database

# What violates a guarantee, and which checks must report it.
DAMAGE = {
    "a committed event is declared dead": (
        "UPDATE batch SET dead = '{[2,3)}' WHERE batch = 1",
        {"lost"},
    ),
    "a delivery is missing": (
        "DELETE FROM delivery_run WHERE seq = 3",
        {"complete", "contiguous"},
    ),
    "an event is gone that a batch has sequenced": (
        "UPDATE batch SET events = events + 1 WHERE batch = 1",
        {"counted"},
    ),
    "an event that no feed passed is a delivery of one": (
        "UPDATE delivery_run SET feed_id = 1 WHERE seq = 3",
        {"complete", "fed"},
    ),
    "an event was never sequenced": (
        """WITH gone AS (DELETE FROM delivery_run WHERE seq = 6 RETURNING 1),
                fewer AS (UPDATE lane_counter SET last_seq = 5)
           UPDATE lane_progress SET acked_seq = 5""",
        {"complete"},
    ),
    "a delivery of an event that rolled back": (
        "UPDATE delivery_run SET outbox_id = 999 WHERE seq = 3",
        {"complete", "real"},
    ),
    "a delivery to an endpoint without a subscription": (
        "UPDATE subscription SET types = '{other.**}'",
        {"real"},
    ),
    "a delivery of an event that does not meet the filter": (
        "UPDATE subscription SET filter = '@ < 5'",
        {"real"},
    ),
    "a delivery of an event that meets the filter is missing": (
        """WITH alone AS (DELETE FROM delivery_run WHERE seq = 6),
                fewer AS (UPDATE lane_counter SET last_seq = 5),
                less AS (UPDATE lane_progress SET acked_seq = 5)
           UPDATE subscription SET filter = '@ >= 0'""",
        {"complete"},
    ),
    "an event has two numbers": (
        """WITH more AS (INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
                         SELECT lane_id, batch + 1, 7, outbox_id FROM delivery WHERE seq = 6)
           UPDATE lane_counter SET last_seq = 7""",
        {"once"},
    ),
    "a number was taken for a replay and has no delivery": (
        """WITH job AS (
           INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'x') RETURNING id)
           INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
           SELECT job.id, d.endpoint_id, d.id, 6, 1, 5 FROM job, dead_letter d""",
        {"replayed"},
    ),
    "a replay is of another event": (
        """WITH job AS (
           INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'x') RETURNING id),
                asked AS (INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch,
                                              to_seq)
                          SELECT job.id, d.endpoint_id, d.id, 6, 1, 5 FROM job, dead_letter d
                          RETURNING id)
           UPDATE delivery_run d SET replay_id = asked.id, replay_seq = 5
             FROM asked WHERE d.seq = 6""",
        {"replayed", "complete"},
    ),
    "a backfill went on behind what it says": (
        """WITH job AS (INSERT INTO replay_job (kind, requested_by) VALUES ('history', 'x')
                        RETURNING id),
                part AS (
                    INSERT INTO replay_job_endpoint
                           (job_id, endpoint_id, first_id, next_id, last_id,
                                                  taken)
                         SELECT job.id, l.endpoint_id, 1, 6, 6, 1 FROM job, lane l)
           UPDATE delivery_run d SET backfill_id = job.id FROM job WHERE d.seq = 6""",
        {"backfilled", "complete"},
    ),
    "a backfill has lost a delivery": (
        """WITH job AS (INSERT INTO replay_job (kind, requested_by) VALUES ('history', 'x')
                        RETURNING id)
           INSERT INTO replay_job_endpoint
                           (job_id, endpoint_id, first_id, next_id, last_id, taken)
           SELECT job.id, l.endpoint_id, 1, 6, 6, 1 FROM job, lane l""",
        {"backfilled"},
    ),
    "a number was passed without an outcome": (
        "DELETE FROM attempt_run WHERE seq = 1",
        {"accounted"},
    ),
    "a delivery succeeded and was given up": (
        """INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts)
           SELECT endpoint_id, lane_id, 1, 1, 1, 'refused', 1 FROM lane_progress""",
        {"accounted"},
    ),
    "a run of deliveries has an event twice": (
        "UPDATE delivery_run SET offsets = '{1,1}' WHERE seq = 6",
        {"runs", "contiguous"},
    ),
    "a run of attempts has no time for one of them": (
        "UPDATE attempt_run SET count = 2 WHERE seq = 4",
        {"runs", "accounted"},
    ),
    "two rows have the same attempt": (
        """UPDATE attempt_run SET count = 2, starts_us = '{0,1}' WHERE seq = 1""",
        {"runs"},
    ),
    "a run of deliveries has an event that is not known": (
        "UPDATE delivery_run SET offsets = '{0,NULL}' WHERE seq = 6",
        {"runs", "contiguous"},
    ),
    "an attempt has the responses of several": (
        """UPDATE attempt_run SET response = '{"body": ["a"]}' WHERE seq = 1""",
        {"runs"},
    ),
    "a run of attempts has no response for one of them": (
        """UPDATE attempt_run
              SET count = 2, starts_us = '{0,1}', response = '{"headers": {"x-request-id": ["a"]}}'
            WHERE seq = 1""",
        {"runs"},
    ),
    "numbers were acknowledged out of order": (
        "UPDATE lane_progress SET acked_seq = 3, floor_batch = 0",
        {"in order"},
    ),
    "an open gap lies above the cursor": (
        "INSERT INTO gap VALUES (1000, 1001)",
        {"gaps"},
    ),
    "an endpoint changed hands unseen": (
        "UPDATE ownership SET epoch = epoch + 1",
        {"owned"},
    ),
    "a lane has no counter": (
        "DELETE FROM lane_counter",
        {"whole"},
    ),
    "a lane has no checkpoint": ("DELETE FROM lane_progress", {"whole"}),
    "a table was emptied": ("DELETE FROM cursor", {"whole"}),
    "the endpoints of lanes are gone": (
        "SET LOCAL session_replication_role = replica; DELETE FROM endpoint",
        {"whole"},
    ),
    "a checkpoint is beyond its counter": ("UPDATE lane_progress SET acked_seq = 40", {"whole"}),
    "an endpoint has no row in ownership": ("DELETE FROM ownership", {"whole"}),
    "an endpoint has no circuit breaker": ("DELETE FROM endpoint_health", {"whole"}),
    "the counter of a lane was restored": (
        "UPDATE lane_counter SET last_seq = last_seq",
        {"restored"},
    ),
    "the state was restored": ("UPDATE incarnation SET id = id", {"restored"}),
    "the incarnation was lost": ("DELETE FROM incarnation", {"restored"}),
    "a lane is blocked by a discarded dead letter": (
        """WITH decided AS (UPDATE dead_letter SET state = 'discarded')
           INSERT INTO lane_block (lane_id, seq) SELECT lane_id, 5 FROM dead_letter""",
        {"decided"},
    ),
    "a lane is blocked by no dead letter": (
        "INSERT INTO lane_block (lane_id, seq) SELECT lane_id, 2 FROM dead_letter",
        {"decided"},
    ),
    "a removed endpoint has a secret, a subscription and a replay": (
        """WITH job AS (
           INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'x') RETURNING id),
                asked AS (INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch,
                                              to_seq)
                          SELECT job.id, d.endpoint_id, d.id, 5, 1, 5 FROM job, dead_letter d)
           UPDATE endpoint SET state = 'removed'""",
        {"cleared"},
    ),
    "an event is gone": (
        "SET LOCAL relay.remove = 'on'; DELETE FROM outbox WHERE id = 3",
        {"all there", "real"},
    ),
    "an event has an id that the sequence does not assign": (
        "INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE VALUES (0, 'a.b', '{}')",
        {"assigned", "all there"},
    ),
    "an idempotency key was claimed without an event": (
        """INSERT INTO idempotency_key (key, claimed_at, expires_at)
           VALUES ('k', now() - interval '2 d', now() + interval '28 d')""",
        {"claimed"},
    ),
    "open gaps overlap": ("INSERT INTO gap VALUES (2, 3), (3, 4)", {"gaps"}),
    "an endpoint was removed unseen": (
        "UPDATE endpoint SET state = 'removed'",
        {"owned"},
    ),
}


async def _a_life(database: Database) -> None:
    """Deliver six events, the fifth rejected."""
    await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.seq == 5 else OK)
    async with running(database, network):
        await publish(database, *range(6))
        await all_ended(database)


async def test_a_consistent_database_has_no_violations(database: Database) -> None:
    await _a_life(database)
    assert await exceptions(database) == {}


@pytest.mark.slow
@pytest.mark.one_major
async def test_violations_are_found(database: Database, subtests: pytest.Subtests) -> None:
    await _a_life(database)
    async with database.at_hand() as connection:
        for what, (damage, expected) in DAMAGE.items():
            # The audit reads the damage of its own transaction, of which nothing is left.
            transaction = connection.transaction(isolation="repeatable_read")
            with subtests.test(what):
                await transaction.start()
                try:
                    await split_runs(connection)
                    await connection.execute(damage)
                    found = {f.name async for f in run_checks(connection) if f.violations}
                finally:
                    await transaction.rollback()
                assert expected <= found, found


# Event 3 was found late, 8 is not sequenced yet, and 100 was forgotten.
LONG_LOG = """
INSERT INTO outbox (type, payload) SELECT 'a.b', '{}' FROM generate_series(1, 20000);
INSERT INTO batch (batch, high, found)
SELECT n, n * 5, CASE n WHEN 10 THEN '{[3,4)}'::int8multirange ELSE '{}' END
  FROM generate_series(1, 4000) n;
INSERT INTO gap VALUES (8, 8);
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
SELECT (SELECT id FROM lane), CASE n WHEN 3 THEN 10 ELSE (n + 4) / 5 END, n, n
  FROM generate_series(1, 20000) n WHERE n NOT IN (8, 100);
ANALYZE outbox, batch, delivery;
"""


@pytest.mark.full
@pytest.mark.one_major
async def test_the_audit_of_a_long_log_uses_bounded_temporary_space(database: Database) -> None:
    """An array of all batches in every row of a join would take gigabytes."""
    await add_endpoint(database)
    settings = {
        "search_path": "relay",
        "temp_file_limit": "20MB",
        "statement_timeout": "20s",
    }
    async with database.connection(server_settings=settings) as connection:
        await connection.execute(LONG_LOG)
        found = {f.name: f.examples async for f in run_checks(connection)}
    assert found["complete"] == ("event 100 has 0 deliveries for endpoint shop",)
    assert (found["lost"], found["real"], found["once"]) == ((), (), ())


def test_every_check_has_a_violation_that_it_detects() -> None:
    assert {name for _, names in DAMAGE.values() for name in names} == {c.name for c in CHECKS}


def test_what_is_executed_before_a_check_is_a_setting() -> None:
    assert {check.settings[:10] for check in CHECKS} <= {"", "SET LOCAL "}
