"""Leaves: packages beside this one, found when they are used."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox.errors import CannotRun
from outbox.leaves import ADOPT, DEVTOOLS, Leaf
from outbox.plugins import BROKERS
from outbox.version import __version__

if TYPE_CHECKING:
    from tests.support.commands import Command

ROOT = Path(__file__).parents[1]
LEAVES = {each.distribution: each for each in (ADOPT, DEVTOOLS)}
VERSIONS = {
    None: "is not installed",
    "0.0.9": f"has version 0.0.9, outbox-relay {__version__}",
}
"""Versions of a leaf that is refused, and why; None: it is not installed."""


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let the installed leaves have another version; None: they are not there."""

    def find(distribution: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def test_every_leaf_of_the_tree_has_the_licence_and_an_extra_that_installs_it() -> None:
    files = [*ROOT.glob("packages/*/pyproject.toml")]
    licence = (ROOT / "LICENSE").read_bytes()
    assert all(file.with_name("LICENSE").read_bytes() == licence for file in files)
    there = {tomllib.loads(file.read_text())["project"]["name"] for file in files}
    assert there == LEAVES.keys() | {BROKERS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for leaf in LEAVES.values():
        (required,) = project["optional-dependencies"][leaf.extra]
        assert required.startswith(leaf.distribution)


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_leaf_is_loaded(leaf: Leaf) -> None:
    assert leaf.load("cli").__name__ == f"{leaf.package}.cli"


@pytest.mark.parametrize("command", ["demo", "listen", "conform", "prove", "adopt"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_command_names_the_leaf_that_it_needs(
    outbox: Command, monkeypatch: pytest.MonkeyPatch, command: str, version: str | None
) -> None:
    leaf = ADOPT if command == "adopt" else DEVTOOLS
    pretend(monkeypatch, version)
    for arguments in ([command], [command, "--help"]):
        result = outbox(*arguments)
        assert result.code == CannotRun.exit_code
        assert result.error == (
            f"{leaf.distribution} {VERSIONS[version]}; "
            f"run: pip install 'outbox-relay[{leaf.extra}]=={__version__}'"
        )


def test_help_lists_all_commands_without_the_leaves(
    outbox: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, None)
    result = outbox("--help")
    assert result.code == 0
    assert all(f"  {name} " in result.out for name in ("demo", "listen", "adopt", "relay"))
