"""Processes of one collection run each test once, and report what the first one prints."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.cases import TESTS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a fork is safe on Linux only"),
]

PASSING = 30
MODULE = """
import os
import pathlib
import signal

import pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def made():
    with (HERE / "made").open("a") as file:
        yield file
        file.write(f"{os.getpid()}\\n")

@pytest.mark.parametrize("n", range(30))
def test_passes(n, made):
    with (HERE / "ran").open("a") as file:
        file.write(f"{n}\\n")

def test_fails(subtests):
    print("printed before")
    with subtests.test("first"):
        assert 1 == 2
    assert 3 == 4

@pytest.mark.skip(reason="not now")
def test_skipped():
    ...
"""
TOGETHER = """

@pytest.fixture(scope="session")
def shared():
    with (HERE / "shared").open("a") as file:
        file.write("made\\n")

@pytest.mark.together("shared")
@pytest.mark.parametrize("n", range(30, 40))
def test_with_others(n, shared):
    with (HERE / "ran").open("a") as file:
        file.write(f"{n}\\n")
"""
KILLED = """

def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def pytest_on(tmp_path: Path, module: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_them.py").write_text(module)
    # Without the plugins that are installed: loading them takes most of a second.
    env = {"PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.forks", "-p", "no:cacheprovider",
         "-rA", "--rootdir", tmp_path, *options, tmp_path],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def ran(tmp_path: Path) -> list[int]:
    return sorted(map(int, (tmp_path / "ran").read_text().split()))


def test_each_test_runs_once_and_fixtures_end(tmp_path: Path) -> None:
    ended = pytest_on(tmp_path, MODULE, "--forks", "3")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ran(tmp_path) == list(range(PASSING))
    made = (tmp_path / "made").read_text().split()
    assert 1 <= len(made) <= 3
    assert len(set(made)) == len(made)
    assert re.search(r"2 failed, 30 passed, 1 skipped", ended.stdout)
    assert "printed before" in ended.stdout
    assert "assert 3 == 4" in ended.stdout
    assert "[first]" in ended.stdout


def test_one_process_runs_what_belongs_together(tmp_path: Path) -> None:
    ended = pytest_on(tmp_path, MODULE + TOGETHER, "--forks", "3")
    assert ran(tmp_path) == list(range(PASSING + 10)), ended.stdout + ended.stderr
    assert (tmp_path / "shared").read_text() == "made\n"


def test_a_process_that_is_killed_is_a_failure_of_its_test(tmp_path: Path) -> None:
    ended = pytest_on(tmp_path, MODULE + KILLED, "--forks", "3")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the process that ran it ended with the code -9" in ended.stdout
    # It had its next test already.
    assert len(ran(tmp_path)) + ended.stdout.count("it was not run") >= PASSING


@pytest.mark.full
def test_the_first_failure_ends_all_processes(tmp_path: Path) -> None:
    ended = pytest_on(tmp_path, MODULE, "--forks", "2", "-x")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "stopping after 1 failures" in ended.stdout


@pytest.mark.full
def test_an_error_of_the_collection_is_pytests(tmp_path: Path) -> None:
    ended = pytest_on(tmp_path, MODULE + "\nimport not_there\n", "--forks", "2")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "1 error during collection" in ended.stdout
    assert not (tmp_path / "ran").exists()
