"""The build argument EXTRAS of deploy/Dockerfile: what it installs, and errors about the rest."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from outbox.errors import OutboxError
from outbox.extras import IMAGE_EXTRAS, missing_extra
from outbox.leaves import Leaf
from outbox.plugins import DESTINATIONS, load
from outbox.telemetry.exporters import configure_export
from outbox_brokers.client_library import load_class
from outbox_devtools.embedded import EmbeddedPostgres, binaries
from tests.support.checkout import ROOT
from tests.support.wheel import run

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
HAS_CLIENTS = """
from importlib.util import find_spec
print(*(name for name in ("redis", "nats", "rstream", "confluent_kafka") if find_spec(name)))
"""
LOAD = """
from outbox_brokers.client_library import load_class
load_class("nats", "nats", "broker", "NatsBroker")
"""


def _raise_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    error = missing_extra(ModuleNotFoundError(name="click"), "relay", "outbox status")
    assert error is not None
    raise error


def _require_a_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    Leaf("outbox-absent", "adopt").require()


def _load_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    load_class("nats", "a_client_that_is_absent", "broker", "NatsBroker")


def _use_an_unknown_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.plugins.installed", lambda _: {})
    load.__wrapped__(DESTINATIONS, "redis")


def _export_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    configure_export("me", "1")


def _start_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_PG_BIN", raising=False)
    monkeypatch.setattr(binaries, "find_spec", lambda _: None)
    EmbeddedPostgres()


CASES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "relay": _raise_missing_module,
    "adopt": _require_a_leaf,
    "nats": _load_a_client,
    "brokers": _use_an_unknown_scheme,
    "otlp": _export_by_otlp,
    "demo": _start_a_database,
}


@pytest.mark.parametrize("extra", CASES)
def test_an_error_names_the_build_argument_in_an_image_and_pip_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: str
) -> None:
    with pytest.raises(OutboxError) as outside:
        CASES[extra](monkeypatch)
    assert "run: pip install '" in str(outside.value)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for chosen, named in (("redis", f"redis,{extra}"), ("", extra)):
        (tmp_path / IMAGE_EXTRAS).write_text(f"{chosen}\n")
        with pytest.raises(OutboxError) as inside:
            CASES[extra](monkeypatch)
        assert re.search(rf"build the image with --build-arg EXTRAS={named}\b", str(inside.value))
        assert "pip install" not in str(inside.value)
        assert "\n" not in str(inside.value)


def test_the_documented_default_is_that_of_the_dockerfile() -> None:
    (default,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert f"`{default}`" in (ROOT / "docs/howto/deploy.md").read_text()


def _build(directory: Path, extras: str) -> subprocess.CompletedProcess[str]:
    """Run the build stage of the Dockerfile in a directory: its files, then its command."""
    source = directory / "source"
    copied = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    for name in copied:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "tests")
            )
        else:
            shutil.copy(ROOT / name, target)
    # The instructions of the stage: the last one is followed by an empty line.
    stage = DOCKERFILE.partition(" AS build\n")[2].partition("\n\n")[0]
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)", stage, re.MULTILINE)
    assert len(commands) == 2
    path = f"{directory / 'path'}{os.pathsep}{os.environ['PATH']}"
    (directory / "path").mkdir()
    (directory / "path/python3").symlink_to(sys.executable)
    script = "\n".join(commands).replace("/opt/outbox", str(directory / "outbox"))
    return run("sh", "-ec", script, cwd=source, EXTRAS=extras, PATH=path)


@pytest.mark.full
@pytest.mark.parametrize(("extras", "clients"), [("relay", ""), ("redis", "redis")])
def test_an_image_has_the_extras_that_are_chosen(tmp_path: Path, extras: str, clients: str) -> None:
    built = _build(tmp_path, extras)
    assert built.returncode == 0, built.stderr
    programs = tmp_path / "outbox/bin"
    assert run(programs / "python", "-c", HAS_CLIENTS).stdout.strip() == clients
    for command in ("relay", "api", "listen", "adopt", "doctor", "verify"):
        ended = run(programs / "outbox", command, "--help", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    missing = run(programs / "python", "-c", LOAD, cwd=tmp_path).stderr
    assert f"build the image with --build-arg EXTRAS={extras},nats" in missing


@pytest.mark.system
def test_an_extra_that_does_not_exist_ends_the_build(tmp_path: Path) -> None:
    built = _build(tmp_path, "redis,reddis")
    assert (built.returncode, built.stdout) == (1, "")
    assert built.stderr == "EXTRAS: outbox-relay has no extra reddis\n"
