"""Writes .ci/constraints.txt anew: the exact versions that everything is tested with.

    python3 run.py pin

For each Python that is supported pip is asked what it would install of what pyproject.toml
asks for, with every extra and what builds the package.  Where the answers differ, a line says
for which Python it is.  Nothing is installed.  The file names no index and no hashes: both
are of the place where it was made, and the tests run in others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / ".ci" / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
BUILDS = ("editables",)
"""What hatchling asks for when the package is installed as it stands."""

HEADER = """\
# The exact versions that everything is tested with; run.py installs them.
# To renew it:  python3 run.py pin
"""


def main(pip: list[str]) -> int:
    found: dict[str, dict[str, str]] = {}
    for python in PYTHONS:
        print(f"pin: asking for Python {python}", file=sys.stderr, flush=True)
        found[python] = resolve(pip, python)
    FILE.write_text(HEADER + "".join(f"{line}\n" for line in lines(found)))
    print(f"pin: {FILE.relative_to(ROOT)} has {len(FILE.read_text().splitlines()) - 2} versions")
    return 0


def resolve(pip: list[str], python: str) -> dict[str, str]:
    """The version of each package that pip would install for this Python."""
    with tempfile.TemporaryDirectory() as nowhere:
        asked = subprocess.run(
            [
                *pip, "install", "--dry-run", "--ignore-installed", "-qq",
                "--disable-pip-version-check", "--report", "-", "--target", nowhere,
                "--python-version", python, "--only-binary=:all:", *wanted(),
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
    if asked.returncode:
        sys.exit(f"pin: pip cannot find everything for Python {python}; its message is above")
    installed = json.loads(asked.stdout)["install"]
    return {normal(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}


def wanted() -> list[str]:
    """Everything that is ever installed: of the package, of each extra, and to build it."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = read["project"]["optional-dependencies"].values()
    asked = [*read["project"]["dependencies"], *(each for extra in extras for each in extra)]
    return [*asked, *read["build-system"]["requires"], *BUILDS]


def lines(found: dict[str, dict[str, str]]) -> list[str]:
    """A line for each package, or several where Pythons differ."""
    made = []
    for name in sorted({name for versions in found.values() for name in versions}):
        for version in sorted({versions.get(name, "") for versions in found.values()} - {""}):
            pythons = [
                python for python, versions in found.items() if versions.get(name) == version
            ]
            line = f"{name}=={version}"
            if len(pythons) < len(found):
                line += "; " + " or ".join(f"python_version == '{each}'" for each in pythons)
            made.append(line)
    return made


def normal(name: str) -> str:
    """A package's name in the one form of the packaging specifications."""
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
