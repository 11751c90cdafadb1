"""Generated clients work with a real API, as docs/howto/generate-a-client.md makes and uses them.

Nothing that is generated is committed: each session generates once, type checks the programs in
`clients/` and those of the document, and runs them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.errors import CannotRun
from packages.api.tests.walk import prepare
from tests.support.api import api_document, make_token, serving
from tests.support.npm import npm_packages
from tests.support.pypi import pypi_package
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.postgres import Database

PROGRAMS = Path(__file__).with_name("clients")
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "generate-a-client.md"
GENERATOR = "openapi-python-client==0.29.1"
TYPESCRIPT = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3")
LINTERS = ("@redocly/cli@2.77.0", "@stoplight/spectral-cli@6.16.3")
STRICT = ("--strict", "--noUncheckedIndexedAccess")
TO_MODULES = ("--module", "nodenext", "--target", "es2022", "--outDir", "built")

pytestmark = [
    pytest.mark.system,
    pytest.mark.one_major,
    pytest.mark.full,
    pytest.mark.together("clients"),
]


def run(words: list[str], directory: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        words,
        cwd=directory,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def program(heading: str) -> str:
    """The program of the page below a heading."""
    found = re.search(
        rf"^## {heading}\n.*?```text\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


def command(program: str) -> list[str]:
    """The arguments of the command of the page that runs a program."""
    found = re.search(rf"^(?:npx )?{program} (.*)$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def fetched_npm(name: str, *packages: str) -> Path:
    try:
        return npm_packages(name, *packages)
    except CannotRun as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the document."""
    made = tmp_path_factory.mktemp("client")
    (made / "openapi.json").write_bytes(orjson.dumps(api_document()))
    return made


@pytest.fixture(scope="session")
def python_program(directory: Path) -> tuple[list[str], Mapping[str, str]]:
    """The command that runs a program with the generated package, and its environment."""
    try:
        packages = pypi_package(GENERATOR.replace("==", "-"), GENERATOR)
    except CannotRun as error:
        pytest.skip(str(error))
    env = {"PYTHONPATH": os.pathsep.join((str(directory), str(packages)))}
    output = run(
        [sys.executable, "-m", "openapi_python_client", *command("openapi-python-client")],
        directory,
        env,
    )
    assert "WARNING" not in output, output
    shutil.copy(PROGRAMS / "use.py", directory)
    (directory / "page.py").write_text(program("Python"))
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(directory / "cache")]
    run([sys.executable, "-m", "mypy", *options, "use.py", "page.py"], directory)
    return [sys.executable], env


@pytest.fixture(scope="session")
def typescript_program(directory: Path) -> Path:
    """The directory of the compiled programs."""
    modules = fetched_npm("openapi-typescript", *TYPESCRIPT)
    (directory / "node_modules").symlink_to(modules)
    (directory / "package.json").write_text('{"type": "module"}')
    bin_ = modules / ".bin"
    run([str(bin_ / "openapi-typescript"), *command("openapi-typescript")], directory)
    shutil.copy(PROGRAMS / "use.ts", directory)
    (directory / "page.ts").write_text(program("TypeScript"))
    run([str(bin_ / "tsc"), *STRICT, *TO_MODULES, "use.ts", "page.ts"], directory)
    (directory / "built" / "publish.js").write_text(
        'import { publish } from "./page.js";\nawait publish(...process.argv.slice(2));\n'
    )
    return directory / "built"


async def runs(database: Database, *programs: tuple[list[str], Mapping[str, str]]) -> list[str]:
    """Run programs with a URL and a token, and return what they print."""
    await prepare(database)
    token = await make_token(database, "client")
    async with serving(database) as api:
        return [
            await asyncio.to_thread(
                run,
                [*words, api.url, token],
                PROGRAMS,
                {**env, "OUTBOX_URL": api.url, "OUTBOX_TOKEN": token},
            )
            for words, env in programs
        ]


PAGES_EVENTS = "SELECT count(*) FROM outbox WHERE key = 'order-9' AND type LIKE 'order.%'"


async def test_a_client_that_openapi_python_client_generates(
    database: Database, directory: Path, python_program: tuple[list[str], Mapping[str, str]]
) -> None:
    words, env = python_program
    used, shown = await runs(
        database,
        ([*words, str(directory / "use.py")], env),
        ([*words, str(directory / "page.py")], env),
    )
    assert used == "used\n"
    assert "already=False" in shown
    assert await fetchval(database, PAGES_EVENTS) == 2


async def test_types_that_openapi_typescript_generates(
    database: Database, typescript_program: Path
) -> None:
    used, shown = await runs(
        database,
        (["node", str(typescript_program / "use.js")], {}),
        (["node", str(typescript_program / "publish.js")], {}),
    )
    assert used == "used\n"
    assert "already: false" in shown
    assert await fetchval(database, PAGES_EVENTS) == 2


def test_redocly_and_spectral_find_nothing(directory: Path) -> None:
    """By their recommended rules."""
    bin_ = fetched_npm("openapi-linters", *LINTERS) / ".bin"
    output = run([str(bin_ / "redocly"), "lint", "openapi.json", "--format=json"], directory)
    assert orjson.loads(output[output.index("{") : output.rindex("}") + 1])["problems"] == []
    (directory / "spectral.yaml").write_text('extends: ["spectral:oas"]\n')
    rules = ["--ruleset", "spectral.yaml", "--fail-severity", "hint"]
    assert "No results" in run([str(bin_ / "spectral"), "lint", *rules, "openapi.json"], directory)
