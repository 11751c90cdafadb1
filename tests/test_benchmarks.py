"""The benchmark runs from end to end; its results are not checked."""

from __future__ import annotations

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from click.testing import CliRunner

from benchmarks import __main__ as bench
from benchmarks import (
    api,
    commands,
    commits,
    cursors,
    deliveries,
    failover,
    horizon,
    hostile,
    kept,
    latency,
    majors,
    memory,
    million,
    outage,
    profile,
    receiving,
    replicas,
    watched,
)
from benchmarks.connections import exchanges, keepalive
from benchmarks.connections.servers import SERVERS, HttpServer
from benchmarks.cost import section as cost
from benchmarks.cost.loads import Load as CostLoad
from benchmarks.deliveries import Load
from benchmarks.figures import Row, Samples, Target
from benchmarks.history import Past
from benchmarks.kept import Measured
from benchmarks.peers import contestants, installing, throughput, turns
from benchmarks.peers import latency as peers_latency
from benchmarks.peers.counting import rate
from benchmarks.scale import fair
from benchmarks.scale import section as scale
from benchmarks.scale.crowd import Crowd
from benchmarks.stage import stage as set_up
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from benchmarks.stage import Stage


def row(ours: float, target: Target | None = None) -> Row:
    return Row("latency", "one", "ms", Samples((ours,)), "parts", Samples((1.0,)), target=target)


def cannot_be_had(_: object) -> Path:
    raise CannotRun("pip could not fetch it")


HOSTILE = hostile.Attack(50, 80, 0.4, 0.4, Load("2 lanes", 2, 50), brokers=40)
SMALL = scale.plan(
    endpoints=12,
    lanes=Crowd(2, 6),
    few=3,
    few_lanes=4,
    deliveries=60,
    seconds=0.1,
    backlogs=(80, 40),
    payloads=((4096, 20),),
    delays=((0.05, 20),),
)
DELIVERIES = (
    Load("2 lanes, TLS", 2, 50, scheme="https"),
    Load("2 endpoints", 1, 50, endpoints=2, distinct=True),
)
FOUND = ("lost", "out of order within a key")
COSTS = (CostLoad("backlog", 20, 2, endpoints=2), CostLoad("100/s", 10, 2, per_s=100))
PLAIN_LOOP = contestants.CONTESTANTS[-1]
ABSENT = next(each for each in contestants.CONTESTANTS if each.packages == ("pgqueuer",))


@pytest.mark.full
def test_the_benchmark_measures_every_section_and_writes_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def everything(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
        assert quick
        return [
            *await deliveries.run(stage, rounds, DELIVERIES),
            *await throughput.run(stage, rounds, [PLAIN_LOOP, ABSENT], 0.002),
            *await peers_latency.run(stage, rounds, [PLAIN_LOOP, ABSENT], 0.05),
            *await cost.run(stage, rounds, COSTS, [cost.FLOOR, ABSENT]),
            *await watched.run(stage, rounds, Load("2 lanes", 2, 50)),
            *await api.run(stage, rounds, Load("2 endpoints", 1, 1_000, endpoints=2), (2,)),
            *await commits.run(stage, stage.server, rounds, (2,), 0.2),
            *await majors.run(stage, rounds, (stage.server.major, 9), 0.2),
            *await latency.run(stage, rounds, (100,), 0.2),
            *await memory.run(stage, 2, 50, [(2, "JSON, 6:1", "silent")], large_settle_s=0),
            *await million.run(stage, 1_000),
            *await outage.run(stage, rounds, outage.Outage(0.2, 200, 0.05)),
            *await replicas.run(stage, rounds, [replicas.Load("some", 200, 400)], (1, 2), 6),
            *await replicas.idle(stage, 1.5),
            *await failover.run(stage, 1),
            *await commands.run(stage, 1, Past(200, 20, 10)),
            *await horizon.run(stage, 0.4, 1, 0.4),
            *await receiving.measure(stage, 1, quick=True),
            *await hostile.run(stage, 1, HOSTILE),
            *await exchanges.measure(stage, rounds, quick=True),
            *await scale.run(stage, rounds, SMALL),
            *await fair.run(stage, rounds, 0.3, 100, fair.OTHERS[1:2]),
        ]

    monkeypatch.setattr(bench, "SECTIONS", {"everything": everything})
    monkeypatch.setattr(contestants, "python_packages", cannot_be_had)
    monkeypatch.setattr(exchanges, "APART", ("Python http.server",))
    monkeypatch.setattr(
        commits, "find_pgbench", lambda: None
    )  # The file has a resolution of whole seconds.
    monkeypatch.setattr(memory, "SETTLE_S", 0.1)
    few = ("trace, X-Delivery", "dead show")
    monkeypatch.setattr(commands, "COMMANDS", {name: commands.COMMANDS[name] for name in few})
    words = ["--quick", "--json", "--out", str(tmp_path)]
    ended = CliRunner().invoke(bench.main, words, catch_exceptions=False)
    report = orjson.loads(ended.stdout)
    rows = {(each["section"], each["baseline"]): each for each in report["rows"]}
    # Most of them have several.
    assert Counter(section for section, _ in rows) == {
        "deliveries": 1, "peers": 6, "peers-latency": 2, "cost": 2, "watched": 1, "api": 5,
        "commits": 3, "majors": 3, "latency": 1, "memory": 1, "million": 4, "outage": 5,
        "replicas": 2, "failover": 1, "commands": 1, "horizon": 1, "receiving": 1, "hostile": 4,
        "exchanges": 2, "scale": 7, "fair": 2,
    }  # fmt: skip
    assert all(value > 0 for each in report["rows"] for value in each["ours"])
    assert ended.exit_code == any(each["met"] is False for each in report["rows"])
    written = (tmp_path / "results.md").read_text()
    assert all(f"| {name} |" in written for each in report["rows"] for name in [each["name"]])
    picture = ElementTree.fromstring((tmp_path / "results.svg").read_text())  # noqa: S314 (we drew it)
    bars = picture.findall(".//{http://www.w3.org/2000/svg}rect")
    courses = ElementTree.fromstring((tmp_path / outage.PICTURE).read_text())  # noqa: S314
    assert len(courses.findall(".//{http://www.w3.org/2000/svg}polyline")) == 5
    absent = [each for each in report["rows"] if each["missing_reason"]]
    baseline = [ABSENT.name] * (3 + len(COSTS) * len(cost.RATIOS)) + [
        each.name for each, _ in majors.COMPARISONS
    ]
    assert [each["baseline"] for each in absent] == baseline
    assert f"| {ABSENT.name} | not measured: pip could not fetch it |" in written
    assert {each["name"] for each in absent if each["section"] == "majors"} == {
        "PostgreSQL 9, 16 writers"
    }
    assert len(bars) == 1 + len(report["rows"]) - len(absent)
    systems = re.findall(r"(?m)^\| ([^|]+) \|", (tmp_path / cost.FILE).read_text())
    assert systems == ["outbox", cost.FLOOR.name] * len(COSTS)


@pytest.mark.full
async def test_cursors_are_compared_under_the_same_writers() -> None:
    async with set_up(lambda _: None) as stage:
        rows = {each.name: each for each in await cursors.run(stage, 1, 40)}
    assert [rows[f"outbox: {each}"].ours.values for each in FOUND] == [(0,), (0,)]
    assert rows["by the greatest id: lost"].ours.median > 0
    assert rows["by the horizon: lost"].ours.values == (0,)
    assert rows["by the horizon: out of order within a key"].ours.median > 0


def test_what_a_cursor_loses_and_inverts_is_counted() -> None:
    assert cursors.lost_and_inverted(["1:1", "2:1", "1:2", "1:3"], 4) == (0, 0)
    assert cursors.lost_and_inverted(["1:2", "1:1", "2:1", "2:1"], 5) == (2, 1)


@pytest.mark.full
async def test_requests_race_with_the_idle_close_of_the_servers_that_are_installed(
    tmp_path: Path,
) -> None:
    chosen = [each for each in SERVERS if each.name == "Python http.server"]
    absent = HttpServer("Another", ("another-server",))
    lines: list[str] = []
    stage: Any = SimpleNamespace(directory=tmp_path, say=lines.append)
    failed, again, missing = await keepalive.run(stage, [*chosen, absent], 6, 1)
    assert (failed.ours.values, failed.baseline.values, failed.met) == ((0,), (6,), True)
    assert again.name.startswith("Python http.server")
    assert missing.missing_reason == "another-server is not in PATH"
    assert "of 6 requests, 0 failed, " in lines[0]


@pytest.mark.parametrize(
    ("target", "exit_code"), [(None, 0), (Target("at most", 2), 0), (Target("at least", 3), 1)]
)
def test_a_missed_target_is_a_failure_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target | None, exit_code: int
) -> None:
    monkeypatch.setattr(bench, "_measure", measured_as(row(2.0, target)))
    words = ["--only", "latency", "--out", str(tmp_path)]
    ended = CliRunner().invoke(bench.main, words, catch_exceptions=False)
    assert ended.exit_code == exit_code
    assert ("missed" in ended.stdout) == bool(exit_code)


def measured_as(*rows: Row, date: str = "today") -> Any:
    async def measure(only: list[str], rounds: int, keep: Any, **_: object) -> None:
        for name in only:
            keep(name, Measured(rows, {"date": date}, rounds), {})

    return measure


@pytest.mark.parametrize(
    ("broken_by", "exit_code", "message"),
    [(CannotRun("no room"), 3, "no room"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_an_interrupted_run_keeps_the_completed_sections(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken_by: BaseException,
    exit_code: int,
    message: str,
) -> None:
    @asynccontextmanager
    async def nowhere(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(server_description="18.4", files={})

    async def ends(*_: object, **__: object) -> list[Row]:
        return [row(2.0)]

    async def breaks(*_: object, **__: object) -> list[Row]:
        raise broken_by

    monkeypatch.setattr(bench, "stage", nowhere)
    monkeypatch.setattr(bench, "SECTIONS", {"latency": ends, "memory": breaks})
    ended = CliRunner().invoke(bench.main, ["--rounds", "3", "--out", str(tmp_path)])
    assert ended.exit_code == exit_code
    assert message in ended.stderr
    assert kept.read(tmp_path)["latency"].rows == (row(2.0),)
    assert "- latency (3 rounds)" in (tmp_path / "results.md").read_text()


def test_sections_are_renewed_individually_with_a_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(name: str, date: str, *rows: Row) -> str:
        monkeypatch.setattr(bench, "_measure", measured_as(*rows, date=date))
        words = ["--only", name, "--rounds", "3", "--out", str(tmp_path)]
        CliRunner().invoke(bench.main, words, catch_exceptions=False)
        return (tmp_path / "results.md").read_text()

    absent = replace(row(1.0), baseline=Samples(()), missing_reason="it is not available")
    grown = replace(row(2.0, Target("under", 50)), section="memory", relation="difference")
    measure("latency", "May", row(2.0, Target("at most", 1.5)), absent)
    written = measure("memory", "June", grown)
    assert "- latency (3 rounds): date May." in written
    assert "- memory (3 rounds): date June." in written
    assert "at most 1.5 | **missed** |" in written
    assert "not measured: it is not available" in written
    assert "under 50 " in written
    again = measure("latency", "July", row(1.0, Target("at most", 1.5)))
    assert "- latency (3 rounds): date July." in again
    assert "**missed**" not in again
    assert "- memory (3 rounds): date June." in again


def test_a_quick_run_does_not_change_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK_RESULTS", tmp_path / "quick")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "kept")
    monkeypatch.setattr(bench, "_measure", measured_as(row(2.0)))
    CliRunner().invoke(bench.main, ["--quick", "--only", "latency"], catch_exceptions=False)
    assert {path.name for path in (tmp_path / "quick").iterdir()} == {"results.md", "results.svg"}
    assert not (tmp_path / "kept").exists()


def test_the_rate_is_interpolated_between_5_and_90_percent() -> None:
    """A rate of a hundred a second after an idle second."""
    readings = [(0.0, 0), (1.0, 0), (1.37, 37), (1.92, 92), (2.4, 140)]
    assert rate(readings, 100) == pytest.approx(100)


async def test_a_contestant_that_exits_early_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ended() -> int:
        return 1

    monkeypatch.setattr(turns, "LAST_S", 0.0)
    with pytest.raises(CannotRun, match="contestant ended before all requests had arrived"):
        await turns.unless_ended("contestant", asyncio.Event().wait(), ended())


async def test_a_contestant_that_exits_after_sending_is_counted() -> None:
    everything = asyncio.Event()

    async def ended() -> int:
        everything.set()
        return 0

    assert await turns.unless_ended("contestant", everything.wait(), ended())


def test_every_peer_has_one_exact_version_and_no_path() -> None:
    pins = installing.pins()
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in pins.values())
    named = {name for each in contestants.CONTESTANTS for name in each.packages}
    assert named <= set(pins)
    files = {path.name for path in installing.HERE.iterdir()}
    assert not files & {"package-lock.json", "npm-shrinkwrap.json", ".npmrc"}


def test_an_unknown_section_is_a_usage_error() -> None:
    ended = CliRunner().invoke(bench.main, ["--only", "speed"])
    assert ended.exit_code == 2
    assert (
        "choose from deliveries, formats, brokers, peers, cost, watched, api, commits, publishing, "
        "majors, latency, replays, feeding, memory, million, outage" in ended.stderr
    )


@pytest.mark.full
def test_a_profile_of_a_busy_relay_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "QUICK_REQUESTS", 500)
    ended = CliRunner().invoke(bench.main, ["--profile", "--quick", "--out", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert [path.name for path in tmp_path.iterdir()] == ["profile.svg"]
    picture = ElementTree.parse(tmp_path / "profile.svg")  # noqa: S314 (our own)
    titles = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    # There are a dozen samples or more: too few for a function of which it is certain to have one.
    assert any(" (outbox/relay/" in title for title in titles)


def test_profile_boxes_have_the_width_of_their_share_below_their_callers() -> None:
    tree = profile.grown(["30 a.py:f;b.py:g", "10 a.py:f", "60 c.py:h", "0 c.py:h;d.py:never"])
    assert tree.times == 100
    placed = [(box.name, box.times, before, row) for box, before, row in profile.placed(tree)]
    assert placed == [("c.py:h", 60, 0, 0), ("a.py:f", 40, 60, 0), ("b.py:g", 30, 60, 1)]
