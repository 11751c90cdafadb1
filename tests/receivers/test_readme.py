"""The complete program of each package's README runs, as it is written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import aiohttp
import pytest

from outbox.devtools.embedded.launch import command
from outbox.testing.sender import SECRET, FakeSender
from tests.receivers.programs import PQ
from tests.support.tcp import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.receivers.programs import Language
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PORT = "127.0.0.1:9000"


def first_block(language: Language, kind: str) -> str:
    text = (language.sources / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@contextlib.asynccontextmanager
async def running(words: list[str], url: str, directory: Path, dsn: str) -> AsyncIterator[None]:
    """A receiver that listens, killed at the end."""
    env = {**os.environ, "OUTBOX_SECRET": SECRET, "DATABASE_URL": dsn}
    env["PORT"] = url.rpartition(":")[2].partition("/")[0]
    with (directory / "receiver.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command(words, account=None), cwd=directory, env=env, stdout=log, stderr=log
        )

    async def is_listening() -> bool:
        assert process.returncode is None, (directory / "receiver.log").read_text()
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as client, client.get(url) as response:
                return response.status == 405
        return False

    try:
        await until(is_listening, 30, "the receiver to listen")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def deliver(url: str) -> list[int]:
    """The responses to a delivery, its copy, and an event that is refused."""
    sender = FakeSender(SECRET)
    request = sender.event("order.paid", {"total": 12.5}, key="order-7")
    refused = sender.event("order.paid", b"x", key="order-8", content_type="text/plain")
    statuses = []
    async with aiohttp.ClientSession() as client:
        for each in (request, request, refused):
            async with client.post(url, data=each.body, headers=dict(each.headers)) as response:
                statuses.append(response.status)
    return statuses


async def test_the_program_in_typescripts_readme(
    typescript_package: Language, database: Database
) -> None:
    # Beside the package's dependencies; it finds the package by its own name.
    program = typescript_package.built() / f"readme-{os.getpid()}.mjs"
    program.write_text(first_block(typescript_package, "js"), encoding="utf-8")
    url = f"http://127.0.0.1:{free_port()}/"
    try:
        async with running(
            [shutil.which("node") or "", str(program)], url, program.parent, database.dsn
        ):
            assert await deliver(url) == [200, 200, 422]
    finally:
        program.unlink()
    async with database.connection() as db:
        rows = await db.fetch("SELECT id, total::float8 FROM paid_order")
    assert [tuple(row) for row in rows] == [("order-7", 12.5)]


async def test_the_program_in_gos_readme(
    go_package: Language, database: Database, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}/hooks"
    text = first_block(go_package, "go")
    assert PORT in text
    text = text.replace(PORT, url.removeprefix("http://").removesuffix("/hooks"))
    (tmp_path / "main.go").write_text(text, encoding="utf-8")
    module = "github.com/outbox-relay/receiver-go"
    (tmp_path / "go.mod").write_text(
        f"module example.com/hooks\n\ngo 1.19\n\n"
        f"require (\n\tgithub.com/lib/pq v1.10.7\n\t{module} v0.0.0\n)\n\n"
        f"replace (\n\tgithub.com/lib/pq => {PQ}\n\t{module} => {go_package.built()}\n)\n"
    )
    await asyncio.to_thread(
        subprocess.run,
        ["go", "build", "-o", "hooks", "."],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "GOFLAGS": "-mod=mod", "GOPROXY": "off"},
    )
    dsn = database.dsn + ("&" if "?" in database.dsn else "?") + "sslmode=disable"
    async with running([str(tmp_path / "hooks")], url, tmp_path, dsn):
        assert await deliver(url) == [200, 200, 422]
    async with database.connection() as db:
        rows = await db.fetch("SELECT customer, payload->>'total' FROM purchase")
    assert [tuple(row) for row in rows] == [("order-7", "12.5")]
