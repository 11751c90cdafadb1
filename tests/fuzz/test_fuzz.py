"""Every target holds for its seeds, and for the inputs of a short hunt."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import hunting
from tests.fuzz.hunting import hunt
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.targets import NAMES

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SEED = 20_260_131

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has no wheel for this Python or system, so nothing can be fuzzed here",
)


@needs_atheris
@pytest.mark.parametrize("name", NAMES)
def test_a_target_holds(tmp_path: Path, name: str) -> None:
    found = hunt(name, seed=SEED, kept=tmp_path)
    assert found.input is None, found.output
    # If every input were rejected immediately, a hunt would find nothing.
    assert found.inputs > 50
    assert found.edges > 10


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_product_is_found(mistake: str) -> None:
    name, _ = MISTAKES[mistake]
    ended = run("--target", name, "--mistake", mistake, "--seeds")
    assert ended.returncode == 1, f"{mistake} goes unnoticed: {ended.stdout}"
    assert "Broken" in ended.stderr


@needs_atheris
def test_a_finding_is_stored_and_can_be_reproduced(tmp_path: Path) -> None:
    options = "--target", "patterns", "--mistake", "greedy-star"
    asked = run(*options, "--seed", 1, "--runs", 100, "--kept", tmp_path, "--json")
    assert asked.returncode == 1, asked.stderr
    (result,) = json.loads(asked.stdout)["targets"]
    assert result["error"].startswith("Broken: ")
    place = Path(result["input"])
    assert place.parent == tmp_path / "findings" / "patterns"
    again = run(*options, "--input", place)
    assert (again.returncode, "Broken" in again.stderr) == (1, True)


def test_inputs_can_be_tried_without_atheris(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"order.*\x1forder.paid")
    ended = run("--target", "patterns", "--input", tmp_path / "input")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "patterns: everything holds for 1 inputs\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "x"], "there is no target 'x'; there are responses"),
        (["--input", "x"], "for one target"),
        (["--target", "cron", "--input", "/none"], "No such file"),
        (["--mistake", "x"], "there is no mistake 'x'; there are any-address"),
    ],
)
def test_wrong_usage_is_reported(arguments: list[str], says: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert says in ended.stderr


def test_the_help_names_every_target() -> None:
    result = run("--help").stdout
    for name in NAMES:
        assert f"  {name} " in result


def test_findings_are_ignored_by_git() -> None:
    assert f"{hunting.KEPT.name}/" in (ROOT / ".gitignore").read_text().splitlines()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
