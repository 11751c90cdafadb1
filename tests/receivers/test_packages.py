"""Each package's tests pass, what is published is complete and clean, and one line installs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from outbox.errors import CannotRun
from tests.receivers.programs import NOT_COPIED, PQ, run_step
from tests.support.documents import read

if TYPE_CHECKING:
    from pathlib import Path

    from tests.receivers.programs import Language
    from tests.support.postgres import Server

pytestmark = [pytest.mark.one_major, pytest.mark.full, pytest.mark.together("receivers")]

TIMEOUT_S = 240


async def run(*words: str, directory: Path, **env: str) -> str:
    """Run a command to its end; returns its output."""
    done = await asyncio.to_thread(
        subprocess.run,
        words,
        cwd=directory,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_typescripts_own_tests(typescript_package: Language, server: Server) -> None:
    async with server.database(migrated=False) as database:
        built = typescript_package.built()
        output = await run(
            "node", "--test", "build/unit/", directory=built, DATABASE_URL=database.dsn
        )
    assert "# fail 0" in output
    assert "# skipped 0" in output


async def test_the_package_of_npm_has_what_it_needs_and_nothing_else(
    typescript_package: Language,
) -> None:
    words = ("npm", "pack", "--dry-run", "--json", "--ignore-scripts")
    (packed,) = json.loads(await run(*words, directory=typescript_package.built()))
    files = {each["path"] for each in packed["files"]}
    others = {each for each in files if not each.startswith("dist/")}
    assert others == {"CHANGELOG.md", "LICENSE", "README.md", "package.json"}
    described: dict[str, Any] = json.loads(
        (typescript_package.sources / "package.json").read_text()
    )
    assert "dependencies" not in described
    for entry in described["exports"].values():
        paths = entry.values() if isinstance(entry, dict) else [entry]
        assert {path.removeprefix("./") for path in paths} <= files


async def test_gos_own_tests(go_package: Language, server: Server) -> None:
    built = go_package.built()
    assert await run("gofmt", "-l", ".", directory=built) == ""
    # The tests on PostgreSQL are in a module of their own, which has the driver.
    for module in (built, built / "internal" / "testserver"):
        await run("go", "vet", "./...", directory=module)
        async with server.database(migrated=False) as database:
            dsn = database.dsn + ("&" if "?" in database.dsn else "?") + "sslmode=disable"
            await run("go", "test", "./...", directory=module, DATABASE_URL=dsn)
    described = (go_package.sources / "go.mod").read_text()
    assert "require" not in described


def line_of(package: str) -> str:
    """The line that installs a package from a checkout in `../outbox`."""
    found = re.search(rf"^\| {package} \| `(.+)` \|$", read("docs/howto/install.md"), re.MULTILINE)
    assert found is not None
    readme = read(f"receivers/{package.lower()}/README.md")
    assert f"$ {found[1]}" in readme, "the package's own page says the same"
    return found[1]


def beside_a_checkout(language: Language, room: Path) -> Path:
    """An empty directory, beside a checkout that was never built."""
    application = room / "application"
    application.mkdir()
    copy = room / "outbox" / "receivers" / language.name
    shutil.copytree(language.sources, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return application


async def test_one_line_builds_and_installs_the_npm_package_from_a_checkout(
    typescript_package: Language, tmp_path: Path
) -> None:
    application = beside_a_checkout(typescript_package, tmp_path)
    await run("npm", "init", "--yes", directory=application)
    try:
        await asyncio.to_thread(run_step, ("sh", "-c", line_of("TypeScript")), application)
    except CannotRun as error:
        pytest.skip(str(error))
    # What the application keeps does not depend on the checkout.
    shutil.rmtree(tmp_path / "outbox")
    described: dict[str, Any] = json.loads(
        (typescript_package.sources / "package.json").read_text()
    )
    for entry in set(described["exports"]) - {"./package.json"}:
        module = f"outbox-receiver{entry.removeprefix('.')}"
        await run("node", "--eval", f"import({json.dumps(module)})", directory=application)


async def test_one_line_adds_the_go_module_from_a_checkout(
    go_package: Language, tmp_path: Path
) -> None:
    application = beside_a_checkout(go_package, tmp_path)
    program = re.search(
        r"```go\n(.*?)^```", read("receivers/go/README.md"), re.DOTALL | re.MULTILINE
    )
    assert program is not None
    (application / "main.go").write_text(program[1])
    driver = f"github.com/lib/pq={PQ}"  # In place of a proxy for modules.
    await run("go", "mod", "init", "example.com/hooks", directory=application)
    await run("go", "mod", "edit", "-replace", driver, directory=application)
    await run("sh", "-c", line_of("Go"), directory=application, GOPROXY="off")
    await run("go", "vet", ".", directory=application, GOPROXY="off")
