"""The receivers of the guide, each as a process, checked by `outbox conform`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.process import outbox
from tests.support.receiver_process import ReceiverProcess

if TYPE_CHECKING:
    from tests.support.postgres import Database

ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples" / "receivers"
SECRET = "whsec_" + "dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ="

COMMANDS = {
    "fastapi_postgres.py": ["-m", "uvicorn", "fastapi_postgres:app", "--port", "{port}"],
    "aiohttp_sqlite.py": ["aiohttp_sqlite.py"],
    "flask_sqlalchemy.py": ["-m", "flask", "--app", "flask_sqlalchemy", "run", "--port", "{port}"],
    "django_postgres.py": ["django_postgres.py"],
    "node.mjs": [],
}


def receiver_of_the_guide(
    name: str, dsn: str, directory: Path, secret: str = SECRET
) -> ReceiverProcess:
    """A receiver of the guide; its log and its SQLite file are in the directory."""
    words = COMMANDS[name]
    return ReceiverProcess(
        [sys.executable, *words]
        if name.endswith(".py")
        else [shutil.which("node") or "node", name, *words],
        HERE,
        directory / "receiver.log",
        OUTBOX_SECRET=secret,
        DATABASE_URL=dsn,
        SHOP_FILE=str(directory / "shop.sqlite"),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONPATH=str(ROOT),
    )


@pytest.mark.one_major
@pytest.mark.parametrize(
    "name",
    [
        "fastapi_postgres.py",
        pytest.param("aiohttp_sqlite.py", marks=pytest.mark.full),
        pytest.param("flask_sqlalchemy.py", marks=pytest.mark.full),
        pytest.param("django_postgres.py", marks=pytest.mark.full),
        "node.mjs",
    ],
)
async def test_a_receiver_of_the_guide_conforms(
    name: str, database: Database, tmp_path: Path
) -> None:
    if name.endswith(".mjs") and shutil.which("node") is None:
        pytest.skip("node is not here")
    dsn = database.dsn
    if name.startswith("flask"):
        dsn = dsn.replace("postgresql:", "postgresql+psycopg:")
    receiver = receiver_of_the_guide(name, dsn, tmp_path)
    await receiver.start()
    try:
        await receiver.responses()
        processed_url = f"{receiver.url}/processed"
        ended = await outbox(
            *("conform", f"{receiver.url}/hooks", "--secret", SECRET),
            *("--processed", processed_url),
        )
    finally:
        await receiver.kill()
    assert ended.code == 0, ended.stdout
    assert "it conforms" in ended.stdout
    assert "was not seen" not in ended.stdout


def test_each_receiver_of_the_guide_is_tested() -> None:
    assert {each.name for each in HERE.iterdir() if each.suffix in (".py", ".mjs")} == set(COMMANDS)
