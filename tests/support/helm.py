"""Helm, and the schemas of Kubernetes' objects, fetched once into the ignored directory `build`.

Both come from packages of which a small part is needed: one of three copies of Helm's library, and
the strict schemas of two of 13 versions of Kubernetes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema_rs

import run
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HELM = "helm-python-sdk==0.2.2"
SCHEMAS = "kubernetes-validate==1.37.0"
KUBERNETES = ("1.27", "1.37")
"""The oldest version that the chart accepts, and the newest one with schemas."""

NOTES = "NOTES.txt"

_FETCHED = run.ROOT / "build" / "helm"
_LIBRARY = "helm_python/lib/libhelm_c.so.0.2.2"
_FOLDER = "kubernetes_validate/kubernetes-json-schema/v{}.0-local-strict/"
_ID = "https://kubernetes.io/api/"
_FETCH_S = 300
_RESPONSE_TIMEOUT_S = 60


class Helm:
    """Helm's library, without a helm binary.

    Raises:
        CannotRun: it is not available for this machine, or cannot be fetched.
    """

    def __init__(self, chart: Path) -> None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise CannotRun("Helm's library has no package for this machine")
        self._chart = chart
        self._package = _fetched(HELM, _is_part_of_helm)

    def render(
        self, values: Mapping[str, Any], *, release: str = "shop", namespace: str = "shop"
    ) -> dict[str, str]:
        """The manifests of a release by their templates.

        Raises:
            ValueError: the chart does not accept the values.
        """
        result = self._call("render", values, release=release, namespace=namespace)
        if "error" in result:
            raise ValueError(result["error"])
        rendered: dict[str, str] = result["rendered"]
        return rendered

    def notes(self, values: Mapping[str, Any]) -> str:
        """What `helm install` prints."""
        (notes,) = [text for path, text in self.render(values).items() if path.endswith(NOTES)]
        return notes

    def lint(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The report of `helm lint --strict`."""
        return self._call("lint", values)

    def _call(self, action: str, values: Mapping[str, Any], **more: str) -> dict[str, Any]:
        request = {"action": action, "chart": str(self._chart), "values": values, **more}
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("helm_chart.py")],
            input=json.dumps(request),
            env={**os.environ, "PYTHONPATH": str(self._package)},
            capture_output=True,
            text=True,
            timeout=_RESPONSE_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def validate_object(manifest: Mapping[str, Any], version: str) -> None:
    """Validate an object as a version of Kubernetes does, without unknown fields.

    Raises:
        ValidationError: it is not valid.
        CannotRun: the schemas cannot be fetched.
    """
    folder = _fetched(SCHEMAS, _is_needed_schema) / _FOLDER.format(version)
    group, _, api = manifest["apiVersion"].rpartition("/")
    name = "-".join(filter(None, [manifest["kind"].lower(), group.partition(".")[0], api]))
    schema = json.loads((folder / f"{name}.json").read_text("utf-8"))
    jsonschema_rs.validator_for(schema, registry=_definitions(folder)).validate(manifest)


@cache
def _definitions(folder: Path) -> jsonschema_rs.Registry:
    contents = json.loads((folder / "_definitions.json").read_text("utf-8"))
    return jsonschema_rs.Registry([(f"{_ID}_definitions.json", contents)])


def _is_part_of_helm(name: str) -> bool:
    return name == _LIBRARY or (name.startswith("helm_python/") and name.endswith(".py"))


def _is_needed_schema(name: str) -> bool:
    return name.startswith(tuple(_FOLDER.format(version) for version in KUBERNETES))


def _fetched(requirement: str, is_needed: Callable[[str], bool]) -> Path:
    """The directory with the needed files of a package, fetched if missing."""
    target = _FETCHED / requirement
    if not target.exists():
        _FETCHED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FETCHED) as room:
            wheel = _download(requirement, Path(room))
            unpacked = Path(room) / "unpacked"
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if is_needed(name)]
                opened.extractall(unpacked, names)
            # Renamed when complete; another process may have been faster, with the same result.
            with suppress(OSError):
                unpacked.rename(target)
    return target


def _download(requirement: str, room: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    # The trust store of the tests is for their own servers.
    env = {k: v for k, v in os.environ.items() if k not in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    try:
        done = subprocess.run(
            [*run.find_pip(), "download", *options, "--dest", str(room), requirement],
            env=env,
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"pip did not fetch {requirement} within {_FETCH_S} s") from None
    except run.Stop as stop:
        raise CannotRun(f"{requirement} cannot be fetched: {stop}") from stop
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotRun(f"{requirement} cannot be fetched: {complaints[-1:] or done.returncode}")
    (wheel,) = room.glob("*.whl")
    return wheel
