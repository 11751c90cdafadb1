"""Runs a target under atheris in a process of its own, and reads what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".fuzz"
"""Inputs that found something new, and those that broke something.  Git ignores it."""

_PROGRESS = re.compile(r"#(\d+)\s+\w+\s.*?cov: (\d+)")
_EXCEPTION = re.compile(r"(?:[\w.]*(?:Error|Exception|Exit|Interrupt)|Broken)\b(?!.*libFuzzer)")
_KEPT_IN = re.compile(r"Test unit written to (.+)")


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of a target."""

    target: str
    inputs: int
    edges: int
    """Of the instrumented code, how many were taken."""
    seconds: float
    input: Path | None = None
    """What broke it; None: nothing did."""
    said: str = ""
    """How it broke: the exception's last line."""
    output: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        told = asdict(self)
        del told["output"]
        return told | {"input": None if self.input is None else str(self.input)}


class CannotFuzz(Exception):
    """The fuzzer itself does not work here."""


def hunt(
    name: str,
    *,
    seed: int,
    runs: int | None = None,
    seconds: float | None = None,
    kept: Path = KEPT,
    mistake: str | None = None,
) -> Hunt:
    """Fuzz one target.

    Args:
        seed: the same one, and the same `runs` with nothing kept: the same inputs.
        runs: as many inputs, at least; None without seconds: as many as the target says.
        seconds: or for so long.
        kept: the directory of what is kept.
        mistake: with this one in the product, see `mistakes`.

    Raises:
        CannotFuzz: the process did not even begin.
    """
    how = {"name": name, "kept": str(kept.resolve()), "seed": seed, "runs": runs}
    ended = subprocess.run(
        [
            sys.executable, "-m", "tests.fuzz.child",
            json.dumps({**how, "seconds": seconds, "mistake": mistake}),
        ],
        cwd=ROOT,
        # Sets of texts have an order that depends on it; runs must be repeatable.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        errors="replace",
    )  # fmt: skip
    inputs, edges, took_s = _numbers(ended.stderr)
    if ended.returncode == 0:
        return Hunt(name, inputs, edges, took_s)
    where = _KEPT_IN.search(ended.stderr)
    if where is None:
        last = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-5:])
        raise CannotFuzz(f"{name}: the fuzzer ended with code {ended.returncode}:\n{last}")
    output = ended.stdout + ended.stderr
    return Hunt(name, inputs, edges, took_s, Path(where[1]), _said(output), _told(output))


def keep(hunt: Hunt, kept: Path) -> Hunt:
    """The same, with its input where it stays."""
    if hunt.input is None:
        return hunt
    place = kept.resolve() / "findings" / hunt.target / hunt.input.name
    if place != hunt.input:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hunt.input, place)
    return replace(hunt, input=place)


def _numbers(output: str) -> tuple[int, int, float]:
    """Inputs, edges and seconds."""
    told = _PROGRESS.findall(output)
    inputs, edges = told[-1] if told else (0, 0)
    took = re.search(r"Done \d+ runs in (\d+) second", output)
    units = re.search(r"number_of_executed_units: (\d+)", output)
    return int(units[1] if units else inputs), int(edges), float(took[1]) if took else 0.0


def _said(output: str) -> str:
    """The exception, or what libFuzzer says of an input that took too long or too much."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    summaries = [line for line in lines if line.startswith("SUMMARY:")]
    return next(iter(errors + summaries), "it broke")


def _told(output: str) -> str:
    """The traceback and what is around it."""
    noise = ("INFO:", "WARNING:", "#", "stat::", "Dictionary:", "MS:", "0x", "Base64:")
    return "\n".join(line for line in output.splitlines() if not line.startswith(noise))
