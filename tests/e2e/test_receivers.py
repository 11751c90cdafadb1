"""The receivers of the guide, each as a process, checked by `outbox conform`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from outbox.devtools.embedded.launch import command
from tests.support.process import environment, outbox
from tests.support.tcp import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

ROOT = Path(__file__).parents[2]
HERE = ROOT / "outbox" / "docs" / "receivers"
SECRET = "whsec_" + "dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ="

COMMANDS = {
    "fastapi_postgres.py": ["-m", "uvicorn", "fastapi_postgres:app", "--port", "{port}"],
    "aiohttp_sqlite.py": ["aiohttp_sqlite.py"],
    "flask_sqlalchemy.py": ["-m", "flask", "--app", "flask_sqlalchemy", "run", "--port", "{port}"],
    "django_postgres.py": ["django_postgres.py"],
    "node.mjs": [],
}


class Process:
    """A receiver process of the guide, which a test may kill."""

    def __init__(self, name: str, dsn: str, directory: Path, secret: str = SECRET) -> None:
        self.name = name
        self.secret = secret
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._dsn, self._directory = dsn, directory
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it ends with this one."""
        python = self.name.endswith(".py")
        program = [sys.executable] if python else [shutil.which("node") or "node", self.name]
        words = [each.format(port=self.port) for each in COMMANDS[self.name]]
        settings = {
            "OUTBOX_SECRET": self.secret,
            "DATABASE_URL": self._dsn,
            "SHOP_FILE": str(self._directory / "shop.sqlite"),
            "PORT": str(self.port),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT),
        }
        with (self._directory / "receiver.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command([*program, *words], account=None),
                cwd=HERE,
                env=environment(settings),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def responses(self) -> None:
        """Wait until it responds."""

        async def is_listening() -> bool:
            log = self._directory / "receiver.log"
            assert self._process is not None
            assert self._process.returncode is None, log.read_text()
            with contextlib.suppress(aiohttp.ClientError):
                async with (
                    aiohttp.ClientSession() as client,
                    client.get(f"{self.url}/processed") as processed_url,
                ):
                    return processed_url.status == 200
            return False

        await until(is_listening, 30, f"{self.name} to listen")

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest.mark.one_major
@pytest.mark.parametrize("name", COMMANDS)
async def test_a_receiver_of_the_guide_conforms(
    name: str, database: Database, tmp_path: Path
) -> None:
    if name.endswith(".mjs") and shutil.which("node") is None:
        pytest.skip("node is not here")
    dsn = database.dsn
    if name.startswith("flask"):
        dsn = dsn.replace("postgresql:", "postgresql+psycopg:")
    receiver = Process(name, dsn, tmp_path)
    await receiver.start()
    try:
        await receiver.responses()
        processed_url = f"{receiver.url}/processed"
        ended = await outbox(
            *("conform", f"{receiver.url}/hooks", "--secret", SECRET),
            *("--processed", processed_url, "--checkpoints"),
        )
    finally:
        await receiver.kill()
    assert ended.code == 0, ended.stdout
    assert "it conforms" in ended.stdout
    assert "was not seen" not in ended.stdout


def test_each_receiver_of_the_guide_is_tested() -> None:
    assert {each.name for each in HERE.iterdir() if each.suffix in (".py", ".mjs")} == set(COMMANDS)
