"""The files of deploy/ pass the checks of their own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outbox.config import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "outbox-relay.service"
EXPOSURE_MAX = 2.5
"""Of `systemd-analyze security`: 0 is the least, 10 the most exposed."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def _run(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    out = result.stdout + result.stderr
    assert result.returncode == 0, out
    return out


@pytest.mark.system
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no package for this machine")
    assert _run(str(hadolint), str(DEPLOY / "Dockerfile")) == ""


@pytest.mark.system
def test_the_compose_file_has_the_form_of_the_compose_specification() -> None:
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert "ok -- validation done" in _run(*check, str(DEPLOY / "compose.yaml"))


@pytest.mark.system
@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # The program of another machine is not installed here.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/outbox/bin/outbox", sys.executable))
    assert _run("systemd-analyze", "verify", str(unit)) == ""


@pytest.mark.system
@needs_systemd
def test_the_unit_is_exposed_little() -> None:
    out = _run("systemd-analyze", "security", "--offline=true", str(UNIT))
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", out)
    assert found is not None, out
    assert float(found[1]) < EXPOSURE_MAX, out


@pytest.mark.parametrize("file", ["compose.yaml", UNIT.name])
def test_a_relay_may_shut_down_gracefully_before_it_is_killed(file: str) -> None:
    drain_s = Settings(dsn="postgresql://localhost/x").drain_s
    found = re.search(r"(?:stop_grace_period: |TimeoutStopSec=)(\d+)", (DEPLOY / file).read_text())
    assert found is not None
    assert int(found[1]) > drain_s


def test_the_image_has_the_leaves_of_all_commands() -> None:
    (installs,) = re.findall(
        r"install --no-cache-dir ((?:.|\\\n)*?)\n\n", (DEPLOY / "Dockerfile").read_text()
    )
    leaves = {f"packages/{each.parent.name}" for each in ROOT.glob("packages/*/pyproject.toml")}
    assert set(installs.split()) - {"\\"} == {'".[brokers,otlp]"', *leaves}
    assert "!packages" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_service_that_compose_waits_for_exists() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        for awaited, how in service.get("depends_on", {}).items():
            ends = "completed" in how["condition"]
            assert ends == (services[awaited].get("healthcheck") == {"disable": True})
