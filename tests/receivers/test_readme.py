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

from outbox.testing.sender import SECRET, FakeSender
from tests.receivers.programs import PQ
from tests.support.receiver_process import ReceiverProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.receivers.programs import Language
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full, pytest.mark.together("receivers")]

ADDRESS = "127.0.0.1:9000"


def first_block(language: Language, kind: str) -> str:
    text = (language.sources / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@contextlib.asynccontextmanager
async def running(receiver: ReceiverProcess) -> AsyncIterator[None]:
    """A receiver that listens, killed at the end."""
    try:
        await receiver.start()
        await receiver.responses()
        yield
    finally:
        await receiver.kill()


async def deliver(url: str) -> list[tuple[int, str]]:
    """The responses to a delivery, its copy, and an event that is refused."""
    sender = FakeSender(SECRET)
    request = sender.event("order.paid", {"total": 12.5}, key="order-7")
    refused = sender.event("order.paid", b"x", key="order-8", content_type="text/plain")
    responses = []
    async with aiohttp.ClientSession() as client:
        for each in (request, request, refused):
            async with client.post(url, data=each.body, headers=dict(each.headers)) as response:
                responses.append((response.status, (await response.text()).rstrip()))
    return responses


PROCESSED = [(200, "processed"), (200, "processed before")]


async def test_the_program_in_typescripts_readme(
    typescript_package: Language, database: Database, tmp_path: Path
) -> None:
    # Beside the package's dependencies; it finds the package by its own name.
    program = typescript_package.built() / f"readme-{os.getpid()}.mjs"
    program.write_text(first_block(typescript_package, "js"), encoding="utf-8")
    receiver = ReceiverProcess(
        [shutil.which("node") or "node", str(program)],
        tmp_path,
        tmp_path / "receiver.log",
        ready=("/", 405),
        OUTBOX_SECRET=SECRET,
        DATABASE_URL=database.dsn,
    )
    try:
        async with running(receiver):
            responses = await deliver(f"{receiver.url}/")
    finally:
        program.unlink()
    assert responses == [*PROCESSED, (422, "an order is JSON")]
    async with database.connection() as db:
        rows = await db.fetch("SELECT type, key, payload->>'total' FROM order_event")
    assert [tuple(row) for row in rows] == [("order.paid", "order-7", "12.5")]


async def test_the_program_in_gos_readme(
    go_package: Language, database: Database, tmp_path: Path
) -> None:
    dsn = database.dsn + ("&" if "?" in database.dsn else "?") + "sslmode=disable"
    receiver = ReceiverProcess(
        [str(tmp_path / "hooks")],
        tmp_path,
        tmp_path / "receiver.log",
        ready=("/hooks", 405),
        OUTBOX_SECRET=SECRET,
        DATABASE_URL=dsn,
    )
    text = first_block(go_package, "go")
    assert ADDRESS in text
    text = text.replace(ADDRESS, f"127.0.0.1:{receiver.port}")
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
    async with running(receiver):
        responses = await deliver(f"{receiver.url}/hooks")
    assert responses == [*PROCESSED, (422, "an order is JSON")]
    async with database.connection() as db:
        rows = await db.fetch("SELECT customer, payload->>'total' FROM purchase")
    assert [tuple(row) for row in rows] == [("order-7", "12.5")]
