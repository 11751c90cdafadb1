"""Each package's own tests pass, and what is published is complete and clean."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.receivers.programs import Language
    from tests.support.postgres import Server

pytestmark = [pytest.mark.one_major, pytest.mark.full]

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
