"""Leaves: packages beside this one, found when they are used."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from outbox import Relay
from outbox.errors import CannotRun, MissingExtra, UsageError
from outbox.leaves import ADOPT, API, DEVTOOLS, DOCTOR, Leaf
from outbox.plugins import BROKERS
from outbox.version import __version__
from tests.support.imports import loaded_by
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

ROOT = Path(__file__).parents[1]
LEAVES = {each.distribution: each for each in (ADOPT, API, DEVTOOLS, DOCTOR)}
DOCTOR_COMMANDS = ("rekey", "trace", "doctor", "alerts", "verify", "resequence")
VERSIONS = {
    None: "is not installed",
    "0.0.9": f"has version 0.0.9, outbox-relay {__version__}",
}
"""Versions of a leaf that is refused, and why; None: it is not installed."""


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None, only: str | None = None) -> None:
    """Let the installed leaves, or only one, have another version; None: they are not there."""

    def find(distribution: str) -> str:
        if distribution != (only or distribution):
            return __version__
        if version is None:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def test_every_leaf_of_the_tree_has_the_licence_and_an_extra_that_installs_it() -> None:
    files = [*ROOT.glob("packages/*/pyproject.toml")]
    licence = (ROOT / "LICENSE").read_bytes()
    assert all(file.with_name("LICENSE").read_bytes() == licence for file in files)
    # Otherwise a test module of one leaf could silently be taken for that of another.
    assert all(file.with_name("__init__.py").exists() for file in files)
    there = {tomllib.loads(file.read_text())["project"]["name"] for file in files}
    assert there == LEAVES.keys() | {BROKERS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for leaf in LEAVES.values():
        installed = map(Requirement, project["optional-dependencies"][leaf.extra])
        assert leaf.distribution in {each.name for each in installed}


@pytest.mark.parametrize("leaf", [API, DEVTOOLS])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_leaf_is_refused_without_one_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, leaf: Leaf, version: str | None
) -> None:
    pretend(monkeypatch, version, only="outbox-doctor")
    with pytest.raises(MissingExtra, match=f"outbox-doctor {VERSIONS[version]}"):
        leaf.require()


def test_the_leaves_that_a_leaf_needs_are_its_requirements() -> None:
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        wanted = {Requirement(each).name for each in project["dependencies"]} & LEAVES.keys()
        if (leaf := LEAVES.get(project["name"])) is not None:
            assert wanted == {each.distribution for each in leaf.needs}


@pytest.mark.parametrize(
    ("leaf", "module"), [(ADOPT, "cli"), (API, "server"), (DEVTOOLS, "cli"), (DOCTOR, "cli")]
)
def test_a_leaf_is_loaded(leaf: Leaf, module: str) -> None:
    assert leaf.load(module).__name__ == f"{leaf.package}.{module}"


@pytest.mark.parametrize(
    "command", ["demo", "listen", "conform", "prove", "adopt", *DOCTOR_COMMANDS]
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_command_names_the_leaf_that_it_needs(
    outbox: Command, monkeypatch: pytest.MonkeyPatch, command: str, version: str | None
) -> None:
    leaf = {"adopt": ADOPT, **dict.fromkeys(DOCTOR_COMMANDS, DOCTOR)}.get(command, DEVTOOLS)
    pretend(monkeypatch, version)
    for arguments in ([command], [command, "--help"]):
        result = outbox(*arguments)
        assert result.code == CannotRun.exit_code
        assert result.error == (
            f"{leaf.distribution} {VERSIONS[version]}; "
            f"run: pip install 'outbox-relay[{leaf.extra}]=={__version__}'"
        )


@pytest.mark.parametrize("option", ["admin", "receivers"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_relay_that_has_to_serve_the_api_names_the_leaf(
    outbox: Command, monkeypatch: pytest.MonkeyPatch, option: str, version: str | None
) -> None:
    # The log of these tests stays as it is.
    monkeypatch.setattr("outbox.cli.relay.configure", lambda _: None)
    pretend(monkeypatch, version)
    dsn = "postgresql://localhost/app"
    result = outbox("relay", "--dsn", dsn, f"--{option}", "127.0.0.1:0")
    assert result.code == CannotRun.exit_code
    message = (
        f"outbox-api {VERSIONS[version]}; run: pip install 'outbox-relay[relay]=={__version__}'"
    )
    assert result.error == message
    with pytest.raises(UsageError, match=f"^{option}: .* process of .*, outbox api --{option}"):
        Relay(dsn, **{option: "127.0.0.1:0"})


@pytest.mark.one_major
async def test_a_relay_without_the_api_needs_no_leaf(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, None)
    async with Relay(database.dsn) as relay:
        await until(lambda: relay.ready, what="the relay")


@pytest.mark.system
def test_no_leaf_is_imported_before_it_is_used() -> None:
    loaded = loaded_by("import outbox.cli.main, outbox.cli.relay, outbox.hosting.in_process")
    assert not loaded & {leaf.package for leaf in LEAVES.values()}


def test_help_lists_all_commands_without_the_leaves(
    outbox: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, None)
    result = outbox("--help")
    assert result.code == 0
    assert all(
        f"  {name} " in result.out
        for name in ("demo", "listen", "adopt", *DOCTOR_COMMANDS, "relay")
    )
