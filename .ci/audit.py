"""Checks the packages in .ci/constraints.txt for known vulnerabilities.

    python3 run.py audit

pip-audit looks up the advisories on PyPI for each pinned version.  A known vulnerability
means exit code 1.  If the advisories are unreachable, the script reports that nothing was
audited and exits with 0, so that the checks can pass offline.  A package index mirror may
serve packages without advisories, and pip-audit then reports no vulnerability; so the
script counts the packages that were actually audited.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "constraints.txt"
TIMEOUT_S = 10
OK, VULNERABLE, CANNOT_RUN = 0, 1, 3
_UNREACHABLE = re.compile(r"ConnectionError|Timeout|ServiceError|ProxyError|SSLError|connect to")


def main() -> int:
    pinned = pins_for_this_python(FILE.read_text().splitlines())
    with tempfile.TemporaryDirectory() as directory:
        requirements = Path(directory) / "requirements.txt"
        requirements.write_text("\n".join(pinned) + "\n")
        result = subprocess.run(
            [
                sys.executable, "-m", "pip_audit", "--requirement", str(requirements), "--no-deps",
                "--disable-pip", "--format", "json", "--progress-spinner", "off",
                "--timeout", str(TIMEOUT_S),
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip
    code, lines = evaluate(result.returncode, result.stdout, result.stderr, len(pinned))
    for line in lines:
        print(f"audit: {line}")
    return code


def pins_for_this_python(lines: list[str]) -> list[str]:
    """The pins that apply to this Python, without environment markers."""
    from packaging.requirements import Requirement

    read = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [f"{r.name}{r.specifier}" for r in read if r.marker is None or r.marker.evaluate()]


def evaluate(code: int, out: str, errors: str, pinned: int) -> tuple[int, list[str]]:
    """The exit code and the report lines for pip-audit's output."""
    try:
        packages: list[dict[str, Any]] = json.loads(out)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["no message"])[-1]
        if _UNREACHABLE.search(errors):
            return OK, [f"NOT AUDITED: the advisories are unreachable ({last[:120]})"]
        return CANNOT_RUN, [f"pip-audit failed with exit code {code}: {last[:300]}"]
    bad = [each for each in packages if each.get("vulns")]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    audited = len(packages) - len(unknown)
    lines = [
        f"{each['name']} {each['version']}: {vuln['id']}, fixed in "
        f"{', '.join(vuln.get('fix_versions') or ['no version'])}"
        for each in bad
        for vuln in each["vulns"]
    ]
    if bad:
        return VULNERABLE, [*lines, f"{len(bad)} of {audited} packages are vulnerable"]
    if not audited:
        return OK, [
            f"NOT AUDITED: the package index has no advisories for any of the {pinned} packages"
        ]
    if unknown:
        lines = [f"not audited, because the index has no advisories for them: {', '.join(unknown)}"]
    return OK, [*lines, f"no known vulnerabilities in {audited} of {pinned} packages"]


if __name__ == "__main__":
    sys.exit(main())
