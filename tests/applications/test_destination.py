"""The destination of the guide "Write a destination", as its author has it: without this tree."""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from outbox_devtools.embedded.launch import command
from tests.support.process import environment
from tests.support.relay import all_ended, publish
from tests.support.wheel import PINS, ROOT, make_environment, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

EXAMPLE = ROOT / "examples/destinations/jsonl"
FILES = ("outbox_jsonl.py", "pyproject.toml", "test_outbox_jsonl.py")
LINES_MAX = 200
EVENTS = 30


def imported(source: str) -> set[str]:
    """The modules of ours that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module="outbox", names=names):
                found |= {f"outbox.{each.name}" for each in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
    return {each for each in found if each.partition(".")[0].startswith("outbox")}


def test_the_example_is_short_and_imports_the_public_module_only() -> None:
    texts = {name: (EXAMPLE / name).read_text("utf-8") for name in FILES}
    lines = [line for text in texts.values() for line in text.splitlines() if line.strip()]
    assert len(lines) < LINES_MAX
    assert imported(texts["outbox_jsonl.py"]) == {"outbox.destination"}
    assert imported(texts["test_outbox_jsonl.py"]) == {
        "outbox.destination",
        "outbox_devtools.destination_suite",
        "outbox_jsonl",
    }


def run_its_tests(python: Path | str, directory: Path, **env: str) -> None:
    argv = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", directory)
    ended = run(*argv, cwd=directory, **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "xfailed" not in ended.stdout


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
def test_the_example_passes_the_suite(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(EXAMPLE / name, tmp_path)
    paths = (ROOT, ROOT / "packages/devtools", tmp_path)
    run_its_tests(sys.executable, tmp_path, PYTHONPATH=":".join(map(str, paths)))


@pytest.fixture
def programs(wheel: Path, tmp_path: Path) -> Path:
    """The programs of an environment with the wheels of the example, the kernel and the suite."""
    author = tmp_path / "author"
    author.mkdir()
    for name in FILES:
        shutil.copy(EXAMPLE / name, author)
    argv = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"-w{tmp_path}", author)
    built = run(*argv, PIP_CONSTRAINT=PINS)
    assert built.returncode == 0, built.stderr
    (plug_in,) = tmp_path.glob("outbox_jsonl-*.whl")
    (devtools,) = wheel.parent.glob("outbox_devtools-*.whl")
    found = f"--find-links={wheel.parent}"
    wanted = (found, f"{wheel}[relay]", f"{devtools}[suite]", str(plug_in))
    programs = make_environment(tmp_path / "env", *wanted)
    (author / "outbox_jsonl.py").unlink()  # From here on it is the wheel's.
    run_its_tests(programs / "python", author)
    return programs


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    directory = tmp_path / "spool"
    directory.mkdir()
    return directory


def messages_of(spool: Path) -> list[dict[str, Any]]:
    """The messages of the only lane."""
    (file,) = spool.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [line for line in lines if "body" in line]


@asynccontextmanager
async def relay_of(programs: Path, env: dict[str, str]) -> AsyncIterator[None]:
    """A relay of an environment, which ends with the block."""
    argv = command([str(programs / "outbox"), "relay"], account=None)
    process = await asyncio.create_subprocess_exec(*argv, env=environment(env))
    try:
        yield
    finally:
        process.terminate()
        async with asyncio.timeout(60):
            code = await process.wait()
    assert code == 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.one_major
async def test_the_example_is_installed_beside_the_wheels_and_delivers_in_order(
    programs: Path, spool: Path, database: Database
) -> None:
    env = {"OUTBOX_DSN": database.dsn}
    url = f"jsonl://localhost{spool}"
    added = run(programs / "outbox", "endpoint", "add", "files", url, "--lanes", "1", **env)
    assert added.returncode == 0, added.stderr
    async with relay_of(programs, env):
        for number in range(EVENTS):
            await publish(database, number, key="one")
        await all_ended(database)
    messages = messages_of(spool)
    assert [each["sequence"] for each in messages] == [*range(1, EVENTS + 1)]
    assert [json.loads(each["body"])["data"] for each in messages] == [*range(EVENTS)]
