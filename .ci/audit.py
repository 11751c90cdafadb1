"""Asks whether anything of .ci/constraints.txt is known to be vulnerable.

    python3 run.py audit

pip-audit asks PyPI's advisories for each pinned version; one with a known vulnerability ends
it with exit code 1.  Where nobody answers, it says that nothing was audited and ends with 0,
because a machine without a way out cannot pass otherwise.  An index that stands in PyPI's
place may know the packages and none of the advisories: pip-audit then finds no vulnerability
in nothing, so what counts is how many packages somebody could say something about.
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
_AWAY = re.compile(r"ConnectionError|Timeout|ServiceError|ProxyError|SSLError|connect to")


def main() -> int:
    pinned = here(FILE.read_text().splitlines())
    with tempfile.TemporaryDirectory() as directory:
        requirements = Path(directory) / "requirements.txt"
        requirements.write_text("\n".join(pinned) + "\n")
        asked = subprocess.run(
            [
                sys.executable, "-m", "pip_audit", "--requirement", str(requirements), "--no-deps",
                "--disable-pip", "--format", "json", "--progress-spinner", "off",
                "--timeout", str(TIMEOUT_S),
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip
    code, told = judge(asked.returncode, asked.stdout, asked.stderr, len(pinned))
    for line in told:
        print(f"audit: {line}")
    return code


def here(lines: list[str]) -> list[str]:
    """What is pinned for this Python, without the markers."""
    from packaging.requirements import Requirement

    read = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [f"{r.name}{r.specifier}" for r in read if r.marker is None or r.marker.evaluate()]


def judge(code: int, out: str, errors: str, pinned: int) -> tuple[int, list[str]]:
    """The exit code, and what is said of what pip-audit found."""
    try:
        packages: list[dict[str, Any]] = json.loads(out)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        if _AWAY.search(errors):
            return OK, [f"NOT AUDITED: the advisories cannot be asked from here ({last[:120]})"]
        return CANNOT_RUN, [f"pip-audit failed with exit code {code}: {last[:300]}"]
    bad = [each for each in packages if each.get("vulns")]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    asked = len(packages) - len(unknown)
    told = [
        f"{each['name']} {each['version']}: {vuln['id']}, fixed in "
        f"{', '.join(vuln.get('fix_versions') or ['no version'])}"
        for each in bad
        for vuln in each["vulns"]
    ]
    if bad:
        return VULNERABLE, [*told, f"{len(bad)} of {asked} packages are vulnerable"]
    if not asked:
        return OK, [
            f"NOT AUDITED: whoever answers in PyPI's place has no advisories for any of the "
            f"{pinned} packages"
        ]
    if unknown:
        told = [f"not audited, because nobody knows them: {', '.join(unknown)}"]
    return OK, [*told, f"nothing is known against {asked} of {pinned} packages"]


if __name__ == "__main__":
    sys.exit(main())
