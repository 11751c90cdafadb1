"""The tiers leave out what they say, and no case is lost unnoticed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support import cases, tiers
from tests.support.cases import FILE, RUN, TESTS

if TYPE_CHECKING:
    from pathlib import Path

REMOVED = tomllib.loads(FILE.read_text("utf-8")).get("removed", [])


@pytest.mark.parametrize(
    ("text", "has_some"),
    [
        ("import pytest\n", True),
        ("pytestmark = pytest.mark.parametrize('n', [1])\n", True),
        ("pytestmark = pytest.mark.system\n", False),
        ("pytestmark = [\n    pytest.mark.asyncio,\n    pytest.mark.browser,\n]\n", False),
        ("pytestmark = pytest.mark.asyncio\n\n\n@pytest.mark.system\ndef test_a(): ...\n", True),
    ],
)
def test_a_module_is_left_out_of_unit_by_its_markers(
    tmp_path: Path, text: str, has_some: bool
) -> None:
    module = tmp_path / "test_a.py"
    module.write_text(text)
    assert tiers.has_unit_tests(module) is has_some


def test_a_sample_leaves_its_other_rows_to_full() -> None:
    kept, *others = tiers.sampled([1, (2, 3), pytest.param(4, id="four")])
    assert kept == 1
    assert [each.values for each in others] == [(2, 3), (4,)]
    assert [[mark.name for mark in each.marks] for each in others] == [["full"]] * 2
    assert others[1].id == "four"
    first, second = tiers.sampled(["a", "b"], lambda row: row == "b")
    assert (first.values, second) == (("a",), "b")


ATTEMPTS = {
    "connects": "import socket\n    socket.create_connection(('127.0.0.1', 1))",
    "listens": "import socket\n    socket.socket().bind(('127.0.0.1', 0))",
    "starts_a_process": "import subprocess\n    subprocess.run(['true'])",
    "hides_it": "import socket\n    try:\n        socket.create_connection(('127.0.0.1', 1))\n"
    "    except OSError:\n        pass",
}
CONFTEST = """
pytest_plugins = ["tests.support.unit_isolation"]

def pytest_configure(config):
    for name in ("system", "slow"):
        config.addinivalue_line("markers", f"{name}: of the tiers")
"""


@pytest.mark.system
@pytest.mark.slow
def test_a_unit_test_that_uses_the_system_fails(tmp_path: Path) -> None:
    tests = [f"def test_{name}():\n    {body}\n" for name, body in ATTEMPTS.items()]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(
        "import pytest\n\n"
        + "\n".join(tests)
        + "\n@pytest.mark.system\ndef test_marked():\n    "
        + ATTEMPTS["listens"]
        + "\n\ndef test_pair():\n    import socket\n    socket.socketpair()\n"
    )
    # Without the plugins that are installed: loading them takes most of a second.
    env = {"PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--rootdir", tmp_path,
         "--confcutdir", tmp_path, tmp_path],
        cwd=TESTS.parent, env=env, capture_output=True, text=True,
    )  # fmt: skip
    outcomes = re.findall(r"^(PASSED|ERROR) .*::test_(\w+)", ended.stdout, re.MULTILINE)
    assert {name for outcome, name in outcomes if outcome == "ERROR"} == {*ATTEMPTS}
    assert {name for outcome, name in outcomes if outcome == "PASSED"} >= {"marked", "pair"}
    assert "mark it with @pytest.mark.system" in ended.stdout


def test_a_lost_case_and_a_new_one_are_reported() -> None:
    content = {
        "made": {"core": {"unit": 10, "default": 12, "full": 13}},
        "removed": [{"folder": "core", "tiers": ["unit", "default"], "cases": 2}],
    }
    wanted = cases.expected(content)
    there = Counter({("core", "unit"): 8, ("core", "default"): 10, ("core", "full"): 13})
    assert cases.differences(there, wanted, ["core"]) == []
    there["core", "unit"] -= 1
    there["core", "full"] += 1
    assert cases.differences(there, wanted, ["core"]) == [
        "core, tier unit: 7 cases, 8 in tests/cases.toml",
        "core, tier full: 14 cases, 13 in tests/cases.toml",
    ]


def test_writing_the_cases_lowers_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cases.toml"
    monkeypatch.setattr(cases, "FILE", file)
    cases.write(Counter({("a", "unit"): 3, ("a", "default"): 5, ("a", "full"): 5}), ["a"])
    removed = '\n[[removed]]\nfolder = "a"\ntiers = ["unit"]\ncases = 1\n'
    file.write_text(file.read_text() + removed)
    cases.write(Counter({("a", "unit"): 1, ("a", "default"): 6, ("a", "full"): 5}), ["a"])
    content = tomllib.loads(file.read_text())
    assert content["made"] == {"a": {"unit": 3, "default": 6, "full": 5}}
    assert file.read_text().endswith(removed)


@pytest.mark.parametrize("removal", REMOVED, ids=lambda each: str(each["what"]))
def test_a_removed_case_is_covered_by_tests_that_exist(removal: dict[str, object]) -> None:
    assert set(removal) == {"folder", "tiers", "cases", "what", "why", "covered_by"}
    assert isinstance(removal["tiers"], list)
    assert set(removal["tiers"]) <= set(RUN)
    assert isinstance(removal["covered_by"], list)
    for name in removal["covered_by"]:
        path, _, function = name.partition("::")
        text = (TESTS.parent / path).read_text("utf-8")
        assert not function or f"def {function.rpartition('::')[2]}(" in text, name


def test_a_table_that_has_become_empty_fails(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("empty_parameter_set_mark") == "fail_at_collect"
