"""Fixtures and options for all tests, those of the leaves in `packages/` included.

`tests/support/tiers.py` has the tiers, and the markers that leave a test out of one.  Options that
override a tier:

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
import signal
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from structlog.testing import capture_logs

from outbox.errors import CannotRun
from outbox_devtools.embedded import installed_binaries
from tests.support import tiers
from tests.support.chromium import chromium
from tests.support.containers import can_build
from tests.support.majors import VERSIONS, provide
from tests.support.pgbouncer import program
from tests.support.promtool import promtool
from tests.support.small_disk import may_mount
from tests.support.tiers import TIERS, tier_of
from tests.support.units import unit_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, MutableMapping

    from tests.support.postgres import Database, Server, SharedServer

pytest_plugins = [
    "tests.support.cases",
    "tests.support.commands",
    "tests.support.forks",
    "tests.support.unit_isolation",
]

hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=False)
hypothesis.settings.register_profile(
    "long", parent=hypothesis.settings.get_profile("ci"), max_examples=5000, stateful_step_count=200
)
for name, tier in TIERS.items():
    hypothesis.settings.register_profile(
        name, parent=hypothesis.settings.get_profile("ci"), max_examples=tier.examples_max
    )

TRUSTED = Path(__file__).parent / "tests" / "support" / "trusted.pem"
"""The trust store of all tests: one authority, without a key. No test has a public receiver."""

_seed_key = pytest.StashKey[int]()
_majors_key = pytest.StashKey[list[int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outbox")
    group.addoption("--unit", action="store_true", help="run the tests that need no system")
    group.addoption("--full", action="store_true", help="run the full tier")
    group.addoption("--soak", action="store_true", help="run the full tier with long random runs")
    group.addoption(
        "--pg", metavar="14,17", help="PostgreSQL majors, or all; missing ones are fetched"
    )
    group.addoption("--seed", type=int, metavar="N", help="seed of the random tests")
    for option, kind, text in tiers.OPTIONS:
        values = ", ".join(
            f"{getattr(tier, option.replace('-', '_'))} ({name})" for name, tier in TIERS.items()
        )
        group.addoption(f"--{option}", type=kind, metavar="N", help=f"{text}; default: {values}")


def pytest_configure(config: pytest.Config) -> None:
    for name, text in tiers.MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    # Hypothesis's plugin loads --hypothesis-profile after this, so that it overrides the tier.
    hypothesis.settings.load_profile(tiers.tier_name(config))
    for option, _, _ in tiers.OPTIONS:
        name = option.replace("-", "_")
        if getattr(config.option, name) is None:
            setattr(config.option, name, getattr(tier_of(config), name))
    asked: int | None = config.getoption("--seed")
    if asked is None:
        # One seed for a run, also when it is shared out among processes.
        asked = getattr(config, "workerinput", {}).get("seed") or int.from_bytes(os.urandom(4))
    config.stash[_seed_key] = asked
    # Tests start processes by the hundred; without this each would compile every module anew.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a background job of a shell without job control.  The commands that tests start and
        # interrupt would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    seed = config.stash[_seed_key]
    if tier_of(config).is_unit:
        return f"tier: unit; seed: {seed}"
    try:
        versions = ", ".join(each.version for each in installed_binaries().values())
    except CannotRun as error:
        versions = str(error)
    proxy = program() or "not there, its tests are left out (apt-get install pgbouncer)"
    browser = chromium() or "not there, its tests are left out (apt-get install chromium)"
    checker = promtool() or "not there, its tests are left out (apt-get install prometheus)"
    disk = "mounted" if may_mount() else "none can be mounted here, its tests are left out"
    image = "built" if can_build() else "cannot be built here, its tests are left out"
    return (
        f"PostgreSQL: {versions}; PgBouncer: {proxy}; browser: {browser}; promtool: {checker}; "
        f"full disk: {disk}; image (--full): {image}; seed: {seed}"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_module = collection_path.suffix == ".py" and tier_of(config).is_unit
    return True if is_module and not tiers.has_unit_tests(collection_path) else None


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same, those that belong together first, and the slow ones spread over three quarters.

    At the end no process is left alone with one of them, and at no time are all at work on
    such ones, which start the most processes and have time-outs.
    """
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(unit_of(item), []).append(item)
    slow = [unit for unit in units.values() if unit[0].get_closest_marker("slow")]
    others = [unit for unit in units.values() if not unit[0].get_closest_marker("slow")]
    placed = [(n / len(slow) * 0.75, unit) for n, unit in enumerate(slow)]
    placed += [(n / len(others), unit) for n, unit in enumerate(others)]
    placed.sort(key=lambda each: (len(each[1]) == 1, each[0]))
    return [item for _, unit in placed for item in unit]


@pytest.hookimpl(trylast=True)  # After pytest has sorted them by their servers.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = tier_of(config)
    if tier.is_unit:
        left_out = {item for item in items if not tiers.is_unit(item)}
    else:
        there = {
            "pgbouncer": program() is not None,
            "browser": chromium() is not None,
            "promtool": promtool() is not None,
            "mounts": may_mount(),
            "image": can_build(),
            "full": tier.is_full,
        }
        missing = [marker for marker, is_there in there.items() if not is_there]
        left_out = {item for item in items if any(map(item.get_closest_marker, missing))}
    items[:] = [item for item in _spread(items) if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    # Thousands of tests stay to the end: nobody has to look again and again whether they do.
    gc.freeze()
    # Rarely: passes over what a test makes take an eighth of the processor time otherwise.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, bool | None, bool | None]:
    """Let the processes of `--forks` share what takes long to make."""
    if session.config.option.forks < 2 or tier_of(session.config).is_unit:
        return (yield)
    from tests.support import forking, prototypes

    forking.share()
    with prototypes.shared():
        return (yield)


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
    if tier_of(config).is_unit:
        return [0]  # Its tests are left out.
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
def servers() -> Iterator[Callable[[int], SharedServer]]:
    """The session's server of a major version, started when first asked for."""
    from tests.support.postgres import SharedServer

    with ExitStack() as running:
        yield cache(lambda major: running.enter_context(SharedServer(major).running()))


@pytest.fixture(scope="session")
def pg_major(request: pytest.FixtureRequest) -> int:
    """A PostgreSQL major version; the test runs once for each."""
    major: int = request.param
    return major


@pytest.fixture
def server(pg_major: int, servers: Callable[[int], SharedServer]) -> SharedServer:
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
def quiet_server(server: SharedServer, database: Database) -> Iterator[None]:
    """For a test that looks at all sessions of the server: there are its own only."""
    with server.quiet():
        yield


@pytest.fixture
async def empty_database(server: Server) -> AsyncIterator[Database]:
    """A database of the test's own with nothing in it, on the shared server."""
    async with server.database(migrated=False) as database:
        yield database


@pytest.fixture(scope="session")
def private_servers() -> Iterator[Callable[[int], Server]]:
    """The session's private server of a major version, created when first asked for."""
    from tests.support.postgres import Server

    with ExitStack() as running:

        def create(major: int) -> Server:
            server = Server(major)
            running.enter_context(server.embedded)
            return server

        yield cache(create)


@pytest.fixture
def private_server(pg_major: int, private_servers: Callable[[int], Server]) -> Server:
    """A server that the test may stop, kill, promote and restart; no other test uses it meanwhile.

    The next test gets the same one, so a test restores the settings and roles that it changes.
    """
    server = private_servers(pg_major)
    server.up()
    return server


@pytest.fixture
async def private_database(private_server: Server) -> AsyncIterator[Database]:
    """A migrated database on the private server (`.server.embedded`)."""
    async with private_server.database() as database:
        yield database
