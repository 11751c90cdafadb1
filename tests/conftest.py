"""Fixtures and options for all tests.

Three tiers:

(default)    every behaviour once, on the newest PostgreSQL: minutes
--full       every PostgreSQL that is installed, and the tests marked `full`
--soak       like --full, on every supported PostgreSQL, with long random runs: hours

Options that override a tier:

--pg 14,17           PostgreSQL majors, or all; missing ones are fetched
--seed N             repeats the random choices of an earlier run
--kills N            kill -9 of the relay in the end-to-end test
--prove-minutes N    length of `outbox prove`, end to end
--ledger-seconds N   kills of relay and receiver over a ledger
--cursor-seconds N   adversarial producers
--sim-seeds N        simulated hours
--silences N         messages after which a relay falls silent, or all
--api-examples N     generated requests of each kind of the API
--model-size N       how much of the protocols' models is explored, 1 to 3
"""

from __future__ import annotations

import gc
import os
import random
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from structlog.testing import capture_logs

from outbox.devtools.embedded import installed_binaries
from outbox.errors import CannotRun
from tests.support.chromium import chromium
from tests.support.containers import can_build
from tests.support.majors import VERSIONS, provide
from tests.support.pgbouncer import program
from tests.support.postgres import Database, Server
from tests.support.promtool import promtool
from tests.support.small_disk import may_mount
from tests.support.tiers import LONG, is_full

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, MutableMapping

hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=False)
hypothesis.settings.register_profile(
    "long", parent=hypothesis.settings.get_profile("ci"), max_examples=5000, stateful_step_count=200
)

TRUSTED = Path(__file__).parent / "support" / "trusted.pem"
"""The trust store of all tests: one authority, without a key. No test has a public receiver."""

_seed_key = pytest.StashKey[int]()
_majors_key = pytest.StashKey[list[int]]()


@dataclass(frozen=True)
class Tier:
    """What a run of the suite covers, unless an option says otherwise."""

    full: bool
    """Whether tests marked `full` run."""
    pg: str
    """PostgreSQL majors: the newest one, those that are installed, or all."""
    kills: int
    prove_minutes: float
    ledger_seconds: float
    cursor_seconds: float
    sim_seeds: int
    silences: str
    """Messages after which a relay falls silent: a number of them, or all."""
    api_examples: int
    model_size: int


TIERS = {
    "default": Tier(False, "newest", 2, 0.2, 4.0, 4.0, 8, "8", 1, 1),
    "full": Tier(True, "installed", 3, 0.2, 6.0, 6.0, 20, "30", 2, 1),
    "soak": Tier(True, "all", 100, 10.0, 300.0, 120.0, 2000, "all", 20, 3),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outbox")
    group.addoption("--full", action="store_true", help="run the full tier")
    group.addoption("--soak", action="store_true", help="run the full tier with long random runs")
    group.addoption(
        "--pg", metavar="14,17", help="PostgreSQL majors, or all; missing ones are fetched"
    )
    group.addoption("--seed", type=int, metavar="N", help="seed of the random tests")
    for option, kind, text in (
        ("kills", int, "kill -9 of the relay, end to end"),
        ("prove-minutes", float, "length of outbox prove, end to end"),
        ("ledger-seconds", float, "kills of relay and receiver over a ledger"),
        ("cursor-seconds", float, "length of the adversarial producers"),
        ("sim-seeds", int, "simulated hours"),
        ("silences", str, "messages after which a relay falls silent, or all"),
        ("api-examples", int, "generated requests of each kind of the API"),
        ("model-size", int, "how much of the protocols' models is explored, 1 to 3"),
    ):
        values = ", ".join(
            f"{getattr(tier, option.replace('-', '_'))} ({name})" for name, tier in TIERS.items()
        )
        group.addoption(f"--{option}", type=kind, metavar="N", help=f"{text}; default: {values}")


EXAMPLES_MAX = {"default": 25, "full": 100, "soak": 1000}
"""Examples of a property test, by tier. The number of random walks is a multiple of it."""
for name, examples_max in EXAMPLES_MAX.items():
    hypothesis.settings.register_profile(
        name, parent=hypothesis.settings.get_profile("ci"), max_examples=examples_max
    )


def _tier_name(config: pytest.Config) -> str:
    if config.getoption("--soak"):
        return "soak"
    return "full" if config.getoption("--full") else "default"


def tier_of(config: pytest.Config) -> Tier:
    """The tier of this run."""
    return TIERS[_tier_name(config)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_major: runs on the newest PostgreSQL only")
    config.addinivalue_line("markers", "pgbouncer: left out where PgBouncer is not installed")
    config.addinivalue_line("markers", "browser: left out where there is no chromium")
    config.addinivalue_line(
        "markers", "promtool: left out where Prometheus's promtool is not there"
    )
    config.addinivalue_line("markers", "mounts: left out where no file system can be mounted")
    config.addinivalue_line("markers", "image: left out where buildah cannot build the image")
    config.addinivalue_line("markers", "costly: like one_major, unless --pg names the majors")
    config.addinivalue_line("markers", "full: runs with --full and --soak only")
    # Hypothesis's plugin loads --hypothesis-profile after this, so that it overrides the tier.
    hypothesis.settings.load_profile(_tier_name(config))
    for name, value in asdict(tier_of(config)).items():
        if name not in ("full", "pg") and getattr(config.option, name) is None:
            setattr(config.option, name, value)
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
    # Last, because majors are fetched over TLS. Every transport loads the trust store, here and in
    # child processes, and the system's takes 50 times as long.
    os.environ["SSL_CERT_FILE"] = str(TRUSTED)
    os.environ["SSL_CERT_DIR"] = str(TRUSTED.parent)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to one of pytest-xdist's processes."""
    node.workerinput["seed"] = node.config.stash[_seed_key]


def pytest_report_header(config: pytest.Config) -> str:
    try:
        versions = ", ".join(each.version for each in installed_binaries().values())
    except CannotRun as error:
        versions = str(error)
    proxy = program() or "not there, its tests are left out (apt-get install pgbouncer)"
    browser = chromium() or "not there, its tests are left out (apt-get install chromium)"
    checker = promtool() or "not there, its tests are left out (apt-get install prometheus)"
    disk = "mounted" if may_mount() else "none can be mounted here, its tests are left out"
    image = "built" if can_build() else "cannot be built here, its tests are left out"
    seed = config.stash[_seed_key]
    return (
        f"PostgreSQL: {versions}; PgBouncer: {proxy}; browser: {browser}; promtool: {checker}; "
        f"full disk: {disk}; image (--full): {image}; seed: {seed}"
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


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_full(item.nodeid):
        item.add_marker(pytest.mark.full)


@pytest.hookimpl(trylast=True)  # After pytest has sorted them by their servers.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = {
        "pgbouncer": program() is not None,
        "browser": chromium() is not None,
        "promtool": promtool() is not None,
        "mounts": may_mount(),
        "image": can_build(),
    }
    items[:] = _spread(items)
    there["full"] = tier_of(config).full
    missing = [marker for marker, is_there in there.items() if not is_there]
    left_out = [item for item in items if any(map(item.get_closest_marker, missing))]
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    # Thousands of tests stay to the end: nobody has to look again and again whether they do.
    gc.freeze()
    gc.enable()


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
            found = installed_binaries()
        except CannotRun as error:
            raise pytest.UsageError(str(error)) from error
        installed = list(found)[: 1 if tier_of(config).pg == "newest" else None]
        config.stash[_majors_key] = _asked(config) or installed
    return config.stash[_majors_key]


def _asked(config: pytest.Config) -> list[int]:
    """The majors that `--pg` names, newest first; none without it."""
    asked: str | None = config.getoption("--pg")
    if not asked and tier_of(config).pg == "all":
        asked = "all"
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
def silences(request: pytest.FixtureRequest) -> int | None:
    """After how many messages a relay falls silent; None: after each."""
    asked: str = request.config.getoption("--silences")
    return None if asked == "all" else int(asked)


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

    def start_server(major: int) -> Server:
        if major not in started:
            server = Server(major)
            server.embedded.start()
            started[major] = server
        return started[major]

    yield start_server
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
