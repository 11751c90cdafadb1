"""Imports follow the layers, and publishing loads nothing heavy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grimp
import importlinter.cli  # noqa: F401 (configures import-linter)
import pytest
from importlinter.application import use_cases

from tests.repository.sources import PACKAGES
from tests.support.imports import HEAVY, loaded_by

if TYPE_CHECKING:
    from grimp import ImportGraph

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]

LAYERS = "Imports go one way"
PLUGINS = "Brokers import the port, the network and the model of a stream"
CORE = "The core's packages import its messages and its model only"
CIRCLES = "No circles"
LEAVES = "The package imports no leaf"
DOCTOR = "The doctor imports no host and no running relay"
API = "The API imports no command, no host and no running relay"
RECEIVER = "The receiver library needs the message format only"


def lint_imports(where: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=where, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("receiver/message.py", "import structlog", RECEIVER),
        (
            "core/delivery/commands.py",
            "if TYPE_CHECKING:\n    from outbox.core.delivery.lane import Lane",
            CIRCLES,
        ),
    ],
)
def test_a_forbidden_import_in_a_file_breaks_its_contract(
    tmp_path: Path, module: str, statement: str, contract: str
) -> None:
    shutil.copytree(ROOT / "outbox", tmp_path / "outbox")
    for leaf in PACKAGES[1:]:
        shutil.copytree(leaf, tmp_path / leaf.name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "outbox" / module).open("a") as source:
        source.write(f"\n{statement}\n")
    output = lint_imports(tmp_path)
    assert output.returncode == 1, output.stdout + output.stderr
    assert f"{contract} BROKEN" in output.stdout
    assert output.stdout.count("BROKEN") == 1


@pytest.fixture(scope="session")
def graph() -> ImportGraph:
    """The package's import graph, to which tests add an import for a moment."""
    names = [each.name for each in PACKAGES]
    return grimp.build_graph(*names, include_external_packages=True, cache_dir=None)


def is_broken(contract: str, graph: ImportGraph, importer: str, imported: str) -> bool:
    """Return whether an additional import breaks a contract; all are checked by `lint-imports`."""
    for module in (importer, imported):
        assert module in graph.modules, f"no module {module}"
    options = use_cases.read_user_options(str(ROOT / "pyproject.toml"))
    options.contracts_options = [e for e in options.contracts_options if e["name"] == contract]
    assert len(options.contracts_options) == 1
    use_cases._register_contract_types(options)
    graph.add_import(importer=importer, imported=imported)
    try:
        report = use_cases._build_report(
            graph=graph, graph_building_duration=0, user_options=options,
            limit_to_contracts=(), show_timings=False, verbose=False,
        )  # fmt: skip
    finally:
        graph.remove_import(importer=importer, imported=imported)
    assert not report.could_not_run
    ((_, check),) = report.get_contracts_and_checks()
    return not check.kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("cli.main", "outbox_devtools.demo", LEAVES),
        ("hosting.hosted_relay", "outbox_api.server", LEAVES),
        ("cli", "outbox.django", LAYERS),
        ("hosting", "outbox.cli", LAYERS),
        ("operations", "outbox_api", LEAVES),
        ("operations", "outbox_doctor.check", LEAVES),
        ("operations", "outbox.relay", LAYERS),
        ("relay", "outbox.operations", LAYERS),
        ("relay", "outbox.testing", LAYERS),
        ("receiver.message", "outbox.testing", LAYERS),
        ("relay", "outbox.hosting", LAYERS),
        ("testing.captured_events", "outbox.hosting", LAYERS),
        ("store", "outbox.alembic", LAYERS),
        ("alembic", "outbox.relay", LAYERS),
        ("store", "outbox.operations", LAYERS),
        ("store", "outbox.relay", LAYERS),
        ("store", "outbox.destinations", LAYERS),
        ("telemetry", "outbox.store", LAYERS),
        ("destinations", "outbox.store", LAYERS),
        ("network", "outbox.destinations", LAYERS),
        ("web", "outbox.network", LAYERS),
        ("producers.publish", "outbox.store", LAYERS),
        ("receiver", "outbox.store", LAYERS),
        ("config", "outbox.store", LAYERS),
        ("core.model", "outbox.config", LAYERS),
        ("errors", "outbox.core", LAYERS),
        ("core.model.event", "outbox.core.delivery", CORE),
        ("core.sequencing.gaps", "outbox.core.delivery", CORE),
        ("core.messages.batch", "outbox.core.delivery", CORE),
        ("core.brokers.message", "outbox.core.delivery", CORE),
        ("core.delivery.commands", "outbox.core.delivery.lane", CIRCLES),
        ("destinations.http.request", "outbox.destinations.endpoint_test", CIRCLES),
        ("store.cluster.replicas", "outbox.store.sequencing.batches", CIRCLES),
        ("store.sql.message", "outbox.store.connection.connect", CIRCLES),
        ("setting_sources", "outbox.operations", CIRCLES),
        ("core.model.retry_policy", "time", "The core is sans-IO"),
        ("producers.publish", "outbox.config", "Publishing is light"),
        ("producers.publish", "aiohttp", "Publishing is light"),
        ("django.publishing", "outbox.config", "Publishing is light"),
        ("receiver.message", "outbox.core.admission", RECEIVER),
        ("receiver.message", "outbox.core.delivery", RECEIVER),
        ("receiver.message", "structlog", RECEIVER),
    ],
)
def test_an_import_contract_forbids_an_import(
    graph: ImportGraph, importer: str, imported: str, contract: str
) -> None:
    assert is_broken(contract, graph, f"outbox.{importer}", imported)


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["outbox.cli", "outbox.hosting", "outbox.relay"])
def test_the_api_is_independent_of_the_process_that_serves_it(
    graph: ImportGraph, imported: str
) -> None:
    assert is_broken(API, graph, "outbox_api.server", imported)


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["outbox.hosting", "outbox.relay", "outbox_api.status"])
def test_the_doctor_checks_a_relay_from_outside(graph: ImportGraph, imported: str) -> None:
    assert is_broken(DOCTOR, graph, "outbox_doctor.relays", imported)


@pytest.mark.parametrize("imported", ["outbox.relay.relay", "outbox.store.errors"])
def test_a_broker_imports_no_relay_and_no_database(graph: ImportGraph, imported: str) -> None:
    assert is_broken(PLUGINS, graph, "outbox_brokers.redis.broker", imported)


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import outbox") & (HEAVY | {"asyncio", "asyncpg", "opentelemetry"})


def test_publishing_loads_nothing_heavy() -> None:
    assert not loaded_by("from outbox import publish, publish_many, reset") & HEAVY


def test_capturing_events_and_sending_fake_ones_loads_nothing_heavy() -> None:
    names = "captured, CapturedEvent, FakeSender, FaultyNetwork, sign"
    unneeded = HEAVY - {"tenacity"} | {"asyncpg"}
    assert not loaded_by(f"from outbox.testing import {names}") & unneeded
    assert not loaded_by("import outbox.testing.fixtures") & unneeded


def test_migrating_with_alembic_loads_nothing_heavy() -> None:
    assert not loaded_by("import outbox.alembic") & (HEAVY | {"sqlalchemy"})


def test_the_embedded_server_loads_nothing_heavy() -> None:
    assert not loaded_by("from outbox_devtools.embedded import EmbeddedPostgres") & (
        HEAVY | {"asyncpg"}
    )
