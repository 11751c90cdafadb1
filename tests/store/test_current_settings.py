"""Secrets in files are read again: what is used then, and what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from outbox.config import load
from outbox.errors import DatabaseUnavailable
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.store.connection.secrets import Vault, new_key

if TYPE_CHECKING:
    from pathlib import Path

    from outbox.store.connection.dsn import Dsn

# As in the addresses.
BEFORE, AFTER = "old", "new"
OLD, NEW = (
    "host=db1 user=app dbname=shop password=old",
    "host=db1 user=app dbname=shop password=new",
)


class Files:
    """The files of a process's secrets, as a directory that Kubernetes mounts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._versions = 0
        self.key = new_key()
        self.write(OLD, self.key)
        env = {
            "OUTBOX_DSN_FILE": str(path / "mounted" / "dsn"),
            "OUTBOX_KEY_FILE": str(path / "mounted" / "key"),
        }
        settings = load(env=env)
        self.current = CurrentSettings(settings, dsn.from_settings(settings, env={}))

    def write(self, address: str, key: str) -> None:
        """Replace the directory by another one, and a link to it."""
        self._versions += 1
        data = self._path / f"..{self._versions}"
        data.mkdir()
        (data / "dsn").write_text(address + "\n")
        (data / "key").write_text(key + "\n")
        link = self._path / "new-link"
        link.symlink_to(data.name)
        link.rename(self._path / "mounted")
        if self._versions > 1:
            before = self._path / f"..{self._versions - 1}"
            for file in before.iterdir():
                file.unlink()
            before.rmdir()

    @property
    def password(self) -> str | None:
        return self.current.address.password

    @property
    def key_ids(self) -> tuple[str, ...]:
        return Vault.from_settings(self.current.settings).key_ids


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    for name in dsn.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Files(tmp_path)


def test_nothing_changes_while_the_files_do_not(files: Files) -> None:
    with capture_logs() as logs:
        files.current.reread()
    assert (files.password, logs) == ("old", [])


def test_changed_secrets_are_used(files: Files) -> None:
    old_ids = files.key_ids
    both = f"{new_key()} {files.key}"
    files.write(NEW, both)
    with capture_logs() as logs:
        files.current.reread()
    assert files.password == AFTER
    assert len(files.key_ids) == 2
    assert set(old_ids) < set(files.key_ids)
    assert [line["changed"] for line in logs] == [["dsn", "key"]]
    assert "new" not in str([line["event"] for line in logs])


BAD_FILES = {
    "no address": ("what is this", None, "OUTBOX_DSN_FILE is not a database address"),
    "empty": ("", None, "OUTBOX_DSN_FILE: the file"),
    "no UTF-8": ("host=db1 password=\udce9", None, "not UTF-8 text"),
    "no key": (NEW, "not a key", "OUTBOX_KEY_FILE: "),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_an_invalid_file_is_reported_once_and_changes_nothing(files: Files, name: str) -> None:
    address, key, says = BAD_FILES[name]
    before = files.key_ids
    written = address.encode("utf-8", "surrogateescape")
    files.write("placeholder", key or files.key)
    mounted = files.current.settings.secret_files["dsn"]
    with open(mounted, "wb") as file:  # noqa: PTH123
        file.write(written)
    with capture_logs() as logs:
        for _ in range(3):
            files.current.reread()
    (line,) = logs
    assert line["log_level"] == "error"
    assert says in line["reason"]
    assert "password" not in line["reason"]
    assert (files.password, files.key_ids) == ("old", before)
    files.write(NEW, files.key)
    files.current.reread()
    assert files.password == AFTER, "the next one is used"


async def test_a_refused_login_is_tried_again_with_a_new_password(files: Files) -> None:
    tried: list[str | None] = []

    async def connect(address: Dsn) -> str:
        tried.append(address.password)
        if address.password != AFTER:
            raise DatabaseUnavailable("refused") from asyncpg.InvalidPasswordError("no")
        return "a connection"

    with pytest.raises(DatabaseUnavailable, match="refused"):
        await files.current.log_in(connect)
    assert tried == ["old"], "the file has not changed"
    files.write(NEW, files.key)
    assert await files.current.log_in(connect) == "a connection"
    assert await files.current.log_in(connect) == "a connection"
    assert tried == ["old", "old", "new", "new"]


async def test_a_password_that_another_connection_has_read_is_used(files: Files) -> None:
    tried: list[str | None] = []

    async def connect(address: Dsn) -> str:
        tried.append(address.password)
        if len(tried) == 1:
            files.write(NEW, files.key)
            files.current.reread()
            raise DatabaseUnavailable("refused") from asyncpg.InvalidPasswordError("no")
        return "a connection"

    assert await files.current.log_in(connect) == "a connection"
    assert tried == ["old", "new"]


async def test_other_failures_do_not_read_the_files(files: Files) -> None:
    async def connect(_: Dsn) -> Any:
        raise DatabaseUnavailable("no server listens") from ConnectionRefusedError()

    files.write(NEW, files.key)
    with pytest.raises(DatabaseUnavailable, match="no server"):
        await files.current.log_in(connect)
    assert files.password == BEFORE


def test_neither_the_environment_nor_a_server_that_is_down_changes_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application removes a password from its environment; the local server restarts."""
    for name in dsn.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGPASSWORD", BEFORE)
    monkeypatch.setattr(dsn, "_local_host", lambda: "/run/postgresql")
    file = tmp_path / "dsn"
    file.write_text("user=app dbname=shop")
    settings = load(env={"OUTBOX_DSN_FILE": str(file)})
    current = CurrentSettings(settings, dsn.from_settings(settings))
    monkeypatch.delenv("PGPASSWORD")
    monkeypatch.setattr(dsn, "_local_host", lambda: "localhost")
    current.reread()
    assert current.address.password == BEFORE
    file.write_text("user=other dbname=shop")
    current.reread()
    found = current.address
    assert (found.user, found.password) == ("other", BEFORE)
    assert found.addresses == (("/run/postgresql", 5432),)


async def test_another_server_is_used_by_the_next_session_only(files: Files) -> None:
    """All connections of a session lead to the same database."""

    async def connect(_: Dsn) -> Any:
        raise DatabaseUnavailable("refused") from asyncpg.InvalidPasswordError("no")

    files.write(NEW.replace("db1", "db2"), files.key)
    with pytest.raises(DatabaseUnavailable, match="refused"):
        await files.current.log_in(connect)
    assert files.current.address.addresses == (("db1", 5432),)
    files.current.reread()
    assert files.current.address.addresses == (("db2", 5432),)
