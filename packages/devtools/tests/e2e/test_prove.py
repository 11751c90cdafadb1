"""`outbox prove` as users run it: real processes and faults, and no resources left behind.

`--prove-minutes 10` is the long run.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from outbox.store.connection import dsn
from outbox_devtools.chaos import queries
from outbox_devtools.chaos.plan import ChaosPlan
from outbox_devtools.chaos.run import RunProgress, run_chaos
from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.support.process import Ended, command_line, environment
from tests.support.processes import family, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SHORT_MINUTES = 0.2
SETTLE_S = 120


async def prove(minutes: float, *words: str, env: Mapping[str, str] | None = None) -> Ended:
    process = await asyncio.create_subprocess_exec(
        *command_line("prove", "--minutes", str(minutes), "--json", *words),
        env=environment(env),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(minutes * 120 + SETTLE_S + 60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def schemas(database: Database) -> list[str]:
    async with database.connection() as connection:
        rows = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname ~ '^outbox'")
    return [row["nspname"] for row in rows]


@pytest.mark.full
async def test_nothing_is_lost_under_any_fault(seed: int, pytestconfig: pytest.Config) -> None:
    minutes: float = pytestconfig.getoption("--prove-minutes")
    size = () if minutes > SHORT_MINUTES else ("--rate", "200", "--endpoints", "40")
    every = "3" if minutes > SHORT_MINUTES else "0.5"
    ended = await prove(
        minutes, "--embedded", "--fault-every", every, "--seed", str(seed % 10**9), *size
    )
    assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
    report = ended.json
    assert report["proven"]
    assert report["lost"] == report["inverted"] == report["holes"] == report["unexplained"] == 0
    assert report["committed"] > 0
    assert report["delivered"] + report["dead_lettered"] >= report["committed"]
    # The report omits a fault that could not be injected; a missing kind must not go unnoticed.
    assert sum(report["faults"].values()) + report["faults_skipped"] >= 23
    print(ended.stdout)


@pytest.mark.full
async def test_only_the_own_schema_changes_in_a_shared_database(
    database: Database, seed: int
) -> None:
    env = {"OUTBOX_DSN": database.dsn}
    receiver = DevelopmentReceiver()
    async with receiver.serve() as url:
        words = ("--rate", "50", "--endpoints", "5", "--replicas", "2", "--lease", "1")
        ended = await prove(
            0.1,
            *words,
            *("--fault-every", "1", "--faults", "kill,cut,terminate", "--seed", str(seed % 10**9)),
            *("--receiver", url),
            env=env,
        )
    assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
    report = ended.json
    # Every event was forwarded to the receiver, and copies, too.
    totals = receiver.totals()
    assert totals.accepted == report["committed"]
    assert report["delivered"] == report["committed"]
    assert await schemas(database) == []


@pytest.mark.full
@pytest.mark.parametrize("is_exact", [True, False])
async def test_a_position_that_is_not_the_snapshot_s_is_noticed(
    database: Database, seed: int, monkeypatch: pytest.MonkeyPatch, is_exact: bool
) -> None:
    take = queries.take_snapshot

    async def take_too_early(
        connection: Connection[Any], schema: str, types: Sequence[str]
    ) -> tuple[str, frozenset[bytes]]:
        position, seen = await take(connection, schema, types)
        later = seen
        while later == seen:
            _, later = await take(connection, schema, types)
        return position, later

    if not is_exact:
        monkeypatch.setattr(queries, "take_snapshot", take_too_early)
    chosen = ChaosPlan(
        minutes=0.1, replicas=2, rate=100, endpoints=3, fault_every_s=1, kinds=("snapshot",),
        seed=seed % 10**9,
    )  # fmt: skip
    address = dsn.parse(database.dsn, source="test", env={})
    report = await run_chaos(chosen, address, RunProgress(print))
    assert report.faults == {"snapshot": 5}
    found = {name: note.count for name, note in report.result.findings.items() if note.count}
    assert found.keys() == (set() if is_exact else {"snapshots"}), report


@pytest.mark.full
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux signals a parent's death to its children"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_nothing_is_left_behind(database: Database, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *command_line("prove", "--rate", "50", "--endpoints", "5", "--faults", "freeze"),
        *("--fault-every", "0.5", "--lease", "10"),
        env=environment({"OUTBOX_DSN": database.dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        process_group=0,
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"freeze: " not in await process.stderr.readline():
            pass
    started = family(process.pid)
    assert len(started) == 4
    assert len(await schemas(database)) == 1
    process.send_signal(number)
    async with asyncio.timeout(60):
        output = (await process.stderr.read()).decode()
        await process.wait()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    await until(lambda: not running(started), what="everything to be gone")
    assert await schemas(database) == []
