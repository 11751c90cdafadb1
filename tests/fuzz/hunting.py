"""Run a target under atheris in a separate process, and parse the result."""

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
"""Inputs that reached new code, and inputs that broke an invariant. Ignored by git."""

_PROGRESS = re.compile(r"#(\d+)\s+\w+\s.*?cov: (\d+)")
_EXCEPTION = re.compile(r"(?:[\w.]*(?:Error|Exception|Exit|Interrupt)|Broken)\b(?!.*libFuzzer)")
_KEPT_IN = re.compile(r"Test unit written to (.+)")


@dataclass(frozen=True, slots=True)
class Hunt:
    """The result of fuzzing a target."""

    target: str
    inputs: int
    edges: int
    """Number of covered edges of the instrumented code."""
    seconds: float
    input: Path | None = None
    """The input that broke the invariant; None: none did."""
    error: str = ""
    """The last line of the exception."""
    output: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        fields = asdict(self)
        del fields["output"]
        return fields | {"input": None if self.input is None else str(self.input)}


class CannotFuzz(Exception):
    """The fuzzer cannot run on this machine."""


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
        seed: With the same seed, `runs` and no corpus, the inputs are the same.
        runs: Minimum number of inputs. None without `seconds`: the target's default.
        seconds: Duration of the hunt.
        kept: The directory of the corpus and the findings.
        mistake: A mistake to apply to the product, see `mistakes`.

    Raises:
        CannotFuzz: The process did not start.
    """
    how = {"name": name, "kept": str(kept.resolve()), "seed": seed, "runs": runs}
    ended = subprocess.run(
        [
            sys.executable, "-m", "tests.fuzz.child",
            json.dumps({**how, "seconds": seconds, "mistake": mistake}),
        ],
        cwd=ROOT,
        # The order of sets depends on the hash seed; runs must be repeatable.
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
    return Hunt(
        name, inputs, edges, took_s, Path(where[1]), _error_line(output), _traceback(output)
    )


def keep(hunt: Hunt, kept: Path) -> Hunt:
    """Return the result with its input moved to the findings."""
    if hunt.input is None:
        return hunt
    place = kept.resolve() / "findings" / hunt.target / hunt.input.name
    if place != hunt.input:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hunt.input, place)
    return replace(hunt, input=place)


def _numbers(output: str) -> tuple[int, int, float]:
    """Return inputs, edges and seconds."""
    fields = _PROGRESS.findall(output)
    inputs, edges = fields[-1] if fields else (0, 0)
    took = re.search(r"Done \d+ runs in (\d+) second", output)
    units = re.search(r"number_of_executed_units: (\d+)", output)
    return int(units[1] if units else inputs), int(edges), float(took[1]) if took else 0.0


def _error_line(output: str) -> str:
    """Return the exception, or libFuzzer's message about an input over a limit."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    summaries = [line for line in lines if line.startswith("SUMMARY:")]
    return next(iter(errors + summaries), "it broke")


def _traceback(output: str) -> str:
    """Return the traceback and its context."""
    noise = ("INFO:", "WARNING:", "#", "stat::", "Dictionary:", "MS:", "0x", "Base64:")
    return "\n".join(line for line in output.splitlines() if not line.startswith(noise))
