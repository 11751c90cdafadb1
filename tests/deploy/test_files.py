"""The files of deploy/ pass the checks of their own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outbox.config import Settings, load
from outbox.core.model.encryption_keys import format_key

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
EXPOSURE_MAX = 1.5
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
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        # The program of another machine is not installed here.
        text = unit.read_text().replace("/opt/outbox/bin/outbox", sys.executable)
        (tmp_path / unit.name).write_text(text)
    copies = sorted(map(str, tmp_path.iterdir()))
    assert _run("systemd-analyze", "verify", *copies) == ""


@pytest.mark.system
@needs_systemd
def test_the_units_are_exposed_little() -> None:
    for unit in UNITS:
        out = _run("systemd-analyze", "security", "--offline=true", str(unit))
        found = re.search(r"Overall exposure level for .*: ([0-9.]+)", out)
        assert found is not None, out
        assert float(found[1]) <= EXPOSURE_MAX, out


def _hardening(unit: Path) -> list[str]:
    """What a unit has after the comment that introduces it."""
    section = unit.read_text().partition("# It needs the network and nothing else.\n")[2]
    return section.partition("\n\n")[0].splitlines()


def test_the_units_have_the_same_hardening() -> None:
    """The relay may also lower the priority of the API beside it."""
    api, migrate, relay = map(_hardening, UNITS)
    assert len(api) > 30
    assert migrate == api
    more = [each for each in relay if each not in api]
    assert [each for each in relay if each not in more] == api
    assert [each for each in more if not each.startswith("#")] == ["SystemCallFilter=setpriority"]


def test_outbox_accepts_the_settings_of_the_units(tmp_path: Path) -> None:
    guide = (ROOT / "docs/howto/deploy.md").read_text()
    for unit in UNITS:
        text = unit.read_text()
        for name, path in re.findall(r"^LoadCredential=(\w+):(\S+)$", text, re.MULTILINE):
            assert path in guide, "the guide says how to make it"
            content = format_key(bytes(32)) if name == "key" else "postgresql://localhost/x"
            (tmp_path / name).write_text(content)
        words = " ".join(re.findall(r"^Environment=(.*)$", text, re.MULTILINE)).split()
        pairs = (word.replace("%d", str(tmp_path)).split("=", 1) for word in words)
        env = {name: value for name, value in pairs if "DSN_FILE" not in name}
        dsn = next(word for word in words if "DSN_FILE" in word).partition("=")[2]
        settings = load(env=env | {"OUTBOX_DSN_FILE": dsn.replace("%d", str(tmp_path))})
        assert (settings.key is None) == ("migrate" in unit.name)


def test_only_the_migration_has_the_credential_of_the_owner() -> None:
    assert {unit.name for unit in UNITS if "migrate-dsn" in unit.read_text()} == {
        "outbox-migrate.service"
    }


@pytest.mark.parametrize("file", ["compose.yaml", "outbox-relay.service"])
def test_a_relay_may_shut_down_gracefully_before_it_is_killed(file: str) -> None:
    drain_s = Settings(dsn="postgresql://localhost/x").drain_s
    found = re.search(r"(?:stop_grace_period: |TimeoutStopSec=)(\d+)", (DEPLOY / file).read_text())
    assert found is not None
    assert int(found[1]) > drain_s


def test_the_image_has_the_leaves_of_all_commands() -> None:
    (installs,) = re.findall(
        r"install --no-cache-dir ((?:.|\\\n)*?)\\\n    &&", (DEPLOY / "Dockerfile").read_text()
    )
    leaves = {f"packages/{each.parent.name}" for each in ROOT.glob("packages/*/pyproject.toml")}
    assert set(installs.split()) - {"\\"} == {'".[relay${EXTRAS:+,$EXTRAS}]"', *leaves}
    assert "!packages" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_service_that_compose_waits_for_exists() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        for awaited, how in service.get("depends_on", {}).items():
            ends = "completed" in how["condition"]
            assert ends == (services[awaited].get("healthcheck") == {"disable": True})
