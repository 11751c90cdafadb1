"""An application installs one package and its driver: publishing and receiving need nothing else.

The default tier refuses the imports of other packages, in four processes of about a second.  With
--full the same programs run in environments that have the wheel and the driver, with the pinned
versions and with the lowest ones: eight environments, each in about ten seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from outbox.store.schema.migration_files import migrations
from outbox_devtools.embedded import installed_binaries
from tests.support.wheel import ROOT, make_environment, pip_install, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PROGRAMS = Path(__file__).parent / "bare"
DOCUMENT = ROOT / "docs/howto/install.md"
NEWEST = str(migrations()[-1].version)

DRIVERS = {
    "asyncpg_only": "asyncpg,async_timeout",
    "without_asyncpg": "psycopg,psycopg_binary,psycopg2,sqlalchemy,greenlet,alembic,mako,"
    "markupsafe,typing_extensions",
    "django_project": "django,asgiref,sqlparse,psycopg,psycopg_binary,typing_extensions",
}
"""The packages that a program's driver installs, by the program."""
MIGRATING = ("without_asyncpg", "django_project")
"""Programs that create the schema."""
INSTALLED = {
    "names": (),
    "asyncpg_only": ("asyncpg",),
    "without_asyncpg": ("psycopg[binary]", "psycopg2-binary", "sqlalchemy[asyncio]", "alembic"),
    "django_project": ("django", "psycopg[binary]"),
}
"""What an application installs beside the package, by the program that uses it."""
LOWEST = dict(re.findall(r"^\| (\S+) \| ([0-9.]+) \|$", DOCUMENT.read_text("utf-8"), re.MULTILINE))
"""The lowest supported version of each, by its name."""
LATER_PYTHONS = ("3.12", "3.13", "3.14")
UNREACHABLE = "Connection|NewConnectionError|Name or service not known|timed out"


def run_program(program: str, python: Path | str, dsn: str, **env: str) -> None:
    """Run a program of `bare`, which ends with an error if something does not work."""
    ended = run(python, PROGRAMS / f"{program}.py", dsn, NEWEST, **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""


def run_without_other_packages(program: str, dsn: str = "") -> None:
    packages = DRIVERS.get(program, "")
    run_program(program, sys.executable, dsn, ONLY_PACKAGES=packages, PYTHONPATH=str(PROGRAMS))


def test_all_names_and_a_receiver_on_sqlite_need_orjson_only() -> None:
    run_without_other_packages("names")


@pytest.mark.parametrize("client", ["redis", "nats"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_reader_of_a_stream_needs_the_leaf_and_its_client_library_only(
    client: str, *, is_there: bool
) -> None:
    program = (
        "from outbox.receiver import MemoryDatabase, StreamReceiver; "
        f"StreamReceiver('{client}://127.0.0.1/s', MemoryDatabase())"
    )
    packages = ["outbox_brokers", *([client, "async_timeout"] if is_there else [])]
    env = {"ONLY_PACKAGES": ",".join(packages), "PYTHONPATH": str(PROGRAMS)}
    ended = run(sys.executable, "-c", program, **env)
    if is_there:
        assert ended.returncode == 0, ended.stderr
    else:
        last = ended.stderr.splitlines()[-1]
        assert f"pip install 'outbox-brokers[{client}]==" in last, ended.stderr


def test_a_command_names_its_extra_where_another_package_has_brought_click() -> None:
    env = {"ONLY_PACKAGES": "click", "PYTHONPATH": str(PROGRAMS)}
    ended = run(sys.executable, "-m", "outbox", "status", **env)
    assert (ended.returncode, ended.stdout) == (3, "")
    error, page = ended.stderr.splitlines()
    assert error.startswith("outbox: this command needs the package ")
    assert error.endswith("; run: pip install 'outbox-relay[relay]'")
    assert page.endswith("/howto/install.md")


@pytest.mark.parametrize(
    ("module", "argv", "what"),
    [
        ("click/exceptions.py", ("-m", "outbox", "status"), "the command line"),
        ("pydantic.py", ("-c", "import outbox; outbox.Relay('x')"), "outbox.Relay"),
    ],
)
def test_what_needs_an_extra_names_a_package_that_the_application_has_in_an_old_version(
    module: str, argv: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    # A name that later versions have is missing.
    file = tmp_path / module
    file.parent.mkdir(exist_ok=True)
    file.touch()
    file.with_name("__init__.py").touch()
    package = module.partition("/")[0].removesuffix(".py")
    env = {"ONLY_PACKAGES": f"{package},structlog", "PYTHONPATH": f"{tmp_path}:{PROGRAMS}"}
    ended = run(sys.executable, *argv, **env)
    assert (
        ended.stderr.splitlines()[-1]
        .rpartition(": pip")[0]
        .endswith(f"{what} needs another version of the package {package}; run")
    ), ended.stderr


def test_the_document_has_the_lowest_version_of_the_dependency() -> None:
    assert lowest_versions("dependencies") == (f"orjson=={LOWEST['orjson']}",)


@pytest.mark.one_major
async def test_publishing_and_receiving_need_the_driver_only(database: Database) -> None:
    run_without_other_packages("asyncpg_only", database.dsn)


@pytest.mark.one_major
@pytest.mark.parametrize("program", MIGRATING)
async def test_alembic_and_django_migrate_with_the_driver_of_the_application(
    program: str, empty_database: Database
) -> None:
    run_without_other_packages(program, empty_database.dsn)


# ---------------------------------------------------------------------------- with --full


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the environment of a program, once; returns its Python."""

    @cache
    def make(program: str, *, is_lowest: bool = False) -> Path:
        drivers = INSTALLED[program]
        directory = tmp_path_factory.mktemp(program) / "env"
        if is_lowest:
            drivers = tuple(f"{each}=={LOWEST[each.partition('[')[0]]}" for each in drivers)
            drivers += lowest_versions("dependencies")
        programs = make_environment(directory, str(wheel), *drivers, pinned=not is_lowest)
        return programs / "python"

    return make


def lowest_versions(*groups: str) -> tuple[str, ...]:
    """The lowest accepted version of each dependency, of the package or of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    requirements = [Requirement(each) for group in groups for each in extras[group]]
    lowest = {
        requirement.name: [each.version for each in requirement.specifier if each.operator == ">="]
        for requirement in requirements
    }
    return tuple(f"{name}=={versions[0]}" for name, versions in lowest.items() if versions)


@pytest.mark.full
@pytest.mark.one_major
@pytest.mark.parametrize("is_lowest", [False, True], ids=["pinned", "lowest"])
@pytest.mark.parametrize("program", ["names", "asyncpg_only"])
async def test_an_application_runs_in_an_environment_of_its_own(
    program: str, is_lowest: bool, installed: Callable[..., Path], database: Database
) -> None:
    run_program(program, installed(program, is_lowest=is_lowest), database.dsn)


@pytest.mark.full
@pytest.mark.one_major
@pytest.mark.parametrize("is_lowest", [False, True], ids=["pinned", "lowest"])
@pytest.mark.parametrize("program", MIGRATING)
async def test_an_application_migrates_in_an_environment_of_its_own(
    program: str, is_lowest: bool, installed: Callable[..., Path], empty_database: Database
) -> None:
    run_program(program, installed(program, is_lowest=is_lowest), empty_database.dsn)


@pytest.mark.full
def test_an_application_without_extras_passes_a_strict_type_check(
    installed: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(PROGRAMS / "typed.py", tmp_path)
    python = installed("names")
    argv = ("-m", "mypy", "--strict", "--python-executable", python, "typed.py")
    checked = run(sys.executable, *argv, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.full
@pytest.mark.one_major
async def test_an_application_runs_on_every_python_that_is_here(
    wheel: Path, tmp_path: Path, database: Database, subtests: pytest.Subtests
) -> None:
    names = [f"python3.{minor}" for minor in range(11, 20)]
    # A command of pyenv is there, and fails, also for versions that are not selected.
    here = [each for each in names if shutil.which(each) and not run(each, "-V").returncode]
    for name in {*here, f"python3.{sys.version_info.minor}"}:
        with subtests.test(name):
            directory = tmp_path / name
            made = run(name, "-m", "venv", "--without-pip", directory)
            assert made.returncode == 0, made.stderr
            pip_install(directory / "bin", str(wheel), "asyncpg")
            for program in ("names", "asyncpg_only"):
                run_program(program, directory / "bin/python", database.dsn)


@pytest.mark.full
@pytest.mark.parametrize("python", LATER_PYTHONS)
def test_everything_that_is_installed_has_wheels_for_later_pythons(
    python: str, wheel: Path, tmp_path: Path
) -> None:
    argv = (sys.executable, "-m", "pip", "download", "-q", f"-d{tmp_path}", "--only-binary=:all:")
    wanted = (f"{wheel}[relay,ed25519]", "asyncpg", "psycopg[binary]", "psycopg2-binary")
    argv = (*argv, f"--find-links={wheel.parent}")
    downloaded = run(*argv, f"--python-version={python}", *wanted)
    if downloaded.returncode and re.search(UNREACHABLE, downloaded.stderr):
        pytest.skip(f"no package index is reachable, so wheels for Python {python} are unknown")
    assert downloaded.returncode == 0, downloaded.stderr


@pytest.mark.full
def test_a_receiver_verifies_ed25519_with_the_lowest_version(wheel: Path, tmp_path: Path) -> None:
    lowest = lowest_versions("dependencies", "ed25519")
    programs = make_environment(tmp_path / "env", f"{wheel}[ed25519]", *lowest, pinned=False)
    run_program("ed25519", programs / "python", "")


@pytest.mark.full
def test_a_relay_runs_with_the_lowest_versions(wheel: Path, tmp_path: Path) -> None:
    lowest = lowest_versions("dependencies", "relay")
    # The demo is in a leaf, and its server is the one of these tests.
    wanted = (f"{wheel}[relay]", "outbox-devtools", f"--find-links={wheel.parent}")
    programs = make_environment(tmp_path / "env", *wanted, *lowest, pinned=False)
    binaries = os.pathsep.join(str(each.bin_dir) for each in installed_binaries().values())
    demo = run(programs / "outbox", "demo", OUTBOX_PG_BIN=binaries)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    for command in ("relay", "status", "migrate", "endpoint"):
        assert run(programs / "outbox", command, "--help").returncode == 0
