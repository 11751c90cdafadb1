"""promtool: Prometheus's own checker of rules, expressions and metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def promtool() -> str | None:
    """The path of promtool, or None."""
    return shutil.which("promtool")


def run_promtool(*args: str | Path, stdin: bytes = b"") -> tuple[bool, str]:
    """Whether the check passes, and its output."""
    program = promtool()
    assert program is not None
    done = subprocess.run(
        [program, *args], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode == 0, done.stdout.decode()


def check_expressions(expressions: Iterable[str], room: Path) -> tuple[bool, str]:
    """Whether all are valid PromQL: as recording rules, which promtool reads from a file."""
    rules = [{"record": f"it:is:number{n}", "expr": expr} for n, expr in enumerate(expressions)]
    path = room / "expressions.yml"
    # JSON is YAML, too.
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    return run_promtool("check", "rules", path)
