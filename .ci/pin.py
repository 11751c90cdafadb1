"""Regenerates .ci/constraints.txt: the exact versions that the tests use.

    python3 run.py pin

For each supported Python, pip resolves the dependencies of pyproject.toml, of all extras
and of the build, without installing them.  Where the versions differ, a line has an
environment marker.  The file contains no index and no hashes, because both depend on the
index that was used, and the tests run with others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / ".ci" / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
BUILDS = ("editables",)
"""What hatchling requires for an editable install."""
INSTALLER = ("uv",)
"""What run.py installs with."""
FIRST_PATCHES = ("async-timeout",)
"""What dependencies require on the first patch releases of Python 3.11, such as Debian's."""

_NAME = re.compile(r"[a-z0-9-]+")

HEADER = """\
# The exact versions that everything is tested with; run.py installs them.
# To update them:  python3 run.py pin
"""


def main(pip: list[str]) -> int:
    found: dict[str, dict[str, str]] = {}
    for python in PYTHONS:
        print(f"pin: resolving for Python {python}", file=sys.stderr, flush=True)
        found[python] = resolve(pip, python)
    FILE.write_text(HEADER + "".join(f"{line}\n" for line in lines(found)))
    print(f"pin: {FILE.relative_to(ROOT)} has {len(FILE.read_text().splitlines()) - 2} versions")
    return 0


def resolve(pip: list[str], python: str) -> dict[str, str]:
    """The version of each package that pip would install for a Python."""
    with tempfile.TemporaryDirectory() as target:
        result = subprocess.run(
            [
                *pip, "install", "--dry-run", "--ignore-installed", "-qq",
                "--disable-pip-version-check", "--report", "-", "--target", target,
                "--python-version", python, "--only-binary=:all:", *wanted(),
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
    if result.returncode:
        sys.exit(f"pin: pip cannot resolve the packages for Python {python}; its message is above")
    installed = json.loads(result.stdout)["install"]
    return {normal(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}


def wanted() -> list[str]:
    """The requirements of the package and its leaves, of all extras and of the build."""
    files = [ROOT / "pyproject.toml", *sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    read = [tomllib.loads(file.read_text("utf-8")) for file in files]
    projects = [each["project"] for each in read]
    own = {each["name"] for each in projects}
    dependencies = [
        text
        for project in projects
        for texts in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for text in texts
        if _NAME.match(text)[0] not in own
    ]
    return [
        *dependencies,
        *read[0]["build-system"]["requires"],
        *BUILDS,
        *INSTALLER,
        *FIRST_PATCHES,
    ]


def lines(found: dict[str, dict[str, str]]) -> list[str]:
    """One line per package, or several with markers where the Pythons differ."""
    result = []
    for name in sorted({name for versions in found.values() for name in versions}):
        for version in sorted({versions.get(name, "") for versions in found.values()} - {""}):
            pythons = [
                python for python, versions in found.items() if versions.get(name) == version
            ]
            line = f"{name}=={version}"
            if len(pythons) < len(found):
                line += "; " + " or ".join(f"python_version == '{each}'" for each in pythons)
            result.append(line)
    return result


def normal(name: str) -> str:
    """The normalized name of a package (PEP 503)."""
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
