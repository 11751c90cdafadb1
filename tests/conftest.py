"""Fixtures and options for all tests.

--pg 14,17   the PostgreSQL majors to test on, or all; what is not there is fetched
             (default: every one there is, without fetching)
--seed N     repeats the random choices of an earlier run
--kills N    how often the end-to-end test kills the relay (default 3)
--prove-minutes N    how long outbox prove goes on, end to end (default: 0.2)
--ledger-seconds N   how long relay and receiver are killed over a ledger (default: 6)
--cursor-seconds N   how long the adversarial producers go on (default: 6)
--sim-seeds N   how many virtual hours are simulated (default: 20)
--api-examples N   requests of each kind that are made of the API's document (default: 2)
--model-size N   how much of the protocols is explored, 1 to 3 (default: 1)
"""

from __future__ import annotations

import gc
import os
import random
import sys
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from structlog.testing import capture_logs

from outbox.devtools.embedded import available
from outbox.errors import CannotRun
from tests.support.chromium import chromium
from tests.support.majors import VERSIONS, provide
from tests.support.pgbouncer import program
from tests.support.postgres import Database, Server
from tests.support.promtool import promtool
from tests.support.small_disk import may_mount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, MutableMapping

hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=False)
hypothesis.settings.register_profile(
    "long", parent=hypothesis.settings.get_profile("ci"), max_examples=5000, stateful_step_count=200
)
hypothesis.settings.load_profile("ci")  # --hypothesis-profile=long comes later and wins.

LONG = (
    "tests/test_benchmarks.py",
    "tests/e2e/",
    "tests/test_readme.py",
    "tests/sim/",
    "tests/models/",
    "tests/test_no_secrets.py",
    "tests/fuzz/",
    "tests/receiver/test_interleavings.py",
)
"""Where the tests are that take the longest, from the longest on."""

_seed_key = pytest.StashKey[int]()
_majors_key = pytest.StashKey[list[int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outbox")
    group.addoption(
        "--pg",
        metavar="14,17",
        help="PostgreSQL majors to test on, or all; missing ones are fetched",
    )
    group.addoption(
        "--kills", type=int, default=3, metavar="N", help="kill -9 of the relay, end to end"
    )
    group.addoption(
        "--ledger-seconds",
        type=float,
        default=6,
        metavar="N",
        help="how long relay and receiver are killed over a ledger; default: 6",
    )
    group.addoption(
        "--prove-minutes",
        type=float,
        default=0.2,
        metavar="N",
        help="how long outbox prove goes on, end to end; default: 0.2",
    )
    group.addoption("--seed", type=int, metavar="N", help="the seed of the random tests")
    group.addoption(
        "--cursor-seconds",
        type=float,
        default=6.0,
        metavar="N",
        help="how long the adversarial producers go on; default: 6",
    )
    group.addoption(
        "--sim-seeds",
        type=int,
        default=20,
        metavar="N",
        help="how many virtual hours are simulated; default: 20",
    )
    group.addoption(
        "--api-examples",
        type=int,
        default=2,
        metavar="N",
        help="requests of each kind that are made of the API's document; default: 2",
    )
    group.addoption(
        "--model-size",
        type=int,
        choices=(1, 2, 3),
        default=1,
        metavar="N",
        help="how much of the protocols is explored, from 1 to 3; default: 1",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_major: runs on the newest PostgreSQL only")
    config.addinivalue_line("markers", "pgbouncer: left out where PgBouncer is not installed")
    config.addinivalue_line("markers", "browser: left out where there is no chromium")
    config.addinivalue_line(
        "markers", "promtool: left out where Prometheus's promtool is not there"
    )
    config.addinivalue_line("markers", "mounts: left out where no file system can be mounted")
    config.addinivalue_line("markers", "costly: like one_major, unless --pg names the majors")
    asked: int | None = config.getoption("--seed")
    if asked is None:
        # One seed for a run, also when it is shared out among processes.
        asked = getattr(config, "workerinput", {}).get("seed") or int.from_bytes(os.urandom(4))
    config.stash[_seed_key] = asked
    # Tests start processes by the hundred; without this each would compile every module anew.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = False
    # pytest-xdist's processes inherit what this one has found.
    if (majors := _asked(config)) and not hasattr(config, "workerinput"):
        try:
            provide(majors)
        except CannotRun as error:
            raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to one of pytest-xdist's processes."""
    node.workerinput["seed"] = node.config.stash[_seed_key]


def pytest_report_header(config: pytest.Config) -> str:
    try:
        versions = ", ".join(each.version for each in available().values())
    except CannotRun as error:
        versions = str(error)
    proxy = program() or "not there, its tests are left out (apt-get install pgbouncer)"
    browser = chromium() or "not there, its tests are left out (apt-get install chromium)"
    checker = promtool() or "not there, its tests are left out (apt-get install prometheus)"
    disk = "mounted" if may_mount() else "none can be mounted here, its tests are left out"
    seed = config.stash[_seed_key]
    return (
        f"PostgreSQL: {versions}; PgBouncer: {proxy}; browser: {browser}; promtool: {checker}; "
        f"full disk: {disk}; seed: {seed}"
    )


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same, with the long ones spread over the first three quarters.

    At the end no process is left alone with one of them, and at no time are all at work on
    such ones, which start the most processes and have time-outs.
    """
    by_length: list[list[pytest.Item]] = [[] for _ in range(len(LONG) + 1)]
    for item in items:
        places = (n for n, place in enumerate(LONG) if item.nodeid.startswith(place))
        by_length[next(places, len(LONG))].append(item)
    *some, others = by_length
    long = list(chain.from_iterable(some))
    placed = [(n / len(long) * 0.75, item) for n, item in enumerate(long)]
    placed += [(n / len(others), item) for n, item in enumerate(others)]
    return [item for _, item in sorted(placed, key=itemgetter(0))]


@pytest.hookimpl(trylast=True)  # After pytest has sorted them by their servers.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = {
        "pgbouncer": program() is not None,
        "browser": chromium() is not None,
        "promtool": promtool() is not None,
        "mounts": may_mount(),
    }
    items[:] = _spread(items)
    missing = [marker for marker, is_there in there.items() if not is_there]
    left_out = [item for item in items if any(map(item.get_closest_marker, missing))]
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    # Thousands of tests stay to the end: nobody has to look again and again whether they do.
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pg_major" not in metafunc.fixturenames:
        return
    majors = _majors(metafunc.config)
    marker = metafunc.definition.get_closest_marker
    if marker("one_major") or (marker("costly") and not _asked(metafunc.config)):
        majors = majors[:1]
    metafunc.parametrize(
        "pg_major", majors, indirect=True, scope="session", ids=[f"pg{major}" for major in majors]
    )


def _majors(config: pytest.Config) -> list[int]:
    """The majors to test on, newest first."""
    # Kept, because looking for them starts programs, and hundreds of tests ask.
    if _majors_key not in config.stash:
        try:
            found = available()
        except CannotRun as error:
            raise pytest.UsageError(str(error)) from error
        config.stash[_majors_key] = _asked(config) or list(found)
    return config.stash[_majors_key]


def _asked(config: pytest.Config) -> list[int]:
    """The majors that `--pg` names, newest first; none without it."""
    asked: str | None = config.getoption("--pg")
    if not asked:
        return []
    try:
        majors = VERSIONS if asked == "all" else {int(each) for each in asked.split(",")}
    except ValueError:
        raise pytest.UsageError(f"--pg {asked}: say majors, such as 14,17, or all") from None
    return sorted(majors, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        seed = item.config.stash[_seed_key]
        report.sections.append(("Seed", f"to repeat it, add --seed {seed}"))
    return report


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The only source of randomness that a test may use; printed when it fails."""
    return request.config.stash[_seed_key]


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator seeded with `seed`, the same for every test."""
    return random.Random(seed)


@pytest.fixture
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged from now on."""
    with capture_logs() as captured:
        yield captured


@pytest.fixture
def cursor_seconds(request: pytest.FixtureRequest) -> float:
    """How long the adversarial producers go on."""
    seconds: float = request.config.getoption("--cursor-seconds")
    return seconds


@pytest.fixture
def api_examples(request: pytest.FixtureRequest) -> int:
    """How many requests of each kind are made of the API's document."""
    examples: int = request.config.getoption("--api-examples")
    return examples


@pytest.fixture
def model_size(request: pytest.FixtureRequest) -> int:
    """How much of the protocols is explored."""
    size: int = request.config.getoption("--model-size")
    return size


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[int], Server]]:
    """The session's server of a major version, started when first asked for."""
    started: dict[int, Server] = {}

    def of(major: int) -> Server:
        if major not in started:
            server = Server(major)
            server.embedded.start()
            started[major] = server
        return started[major]

    yield of
    for server in started.values():
        server.embedded.stop()


@pytest.fixture(scope="session")
def pg_major(request: pytest.FixtureRequest) -> int:
    """A PostgreSQL major version; the test runs once for each."""
    major: int = request.param
    return major


@pytest.fixture
def server(pg_major: int, servers: Callable[[int], Server]) -> Server:
    """A server shared by all tests of the session: do not stop or restart it."""
    server = servers(pg_major)
    server.embedded.start()
    return server


@pytest.fixture
async def database(server: Server) -> AsyncIterator[Database]:
    """A migrated database of the test's own, on the shared server."""
    async with server.database() as database:
        yield database


@pytest.fixture
async def empty_database(server: Server) -> AsyncIterator[Database]:
    """A database of the test's own with nothing in it, on the shared server."""
    async with server.database(migrated=False) as database:
        yield database


@pytest.fixture
def private_server(pg_major: int) -> Iterator[Server]:
    """A server of the test's own, for tests that stop, kill or restart it."""
    server = Server(pg_major)
    with server.embedded:
        yield server


@pytest.fixture
async def private_database(private_server: Server) -> AsyncIterator[Database]:
    """A migrated database on a server of the test's own (`.server.embedded`)."""
    async with private_server.database() as database:
        yield database
