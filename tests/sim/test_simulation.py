"""Virtual hours with faults, and mutants that they must catch.

`--sim-seeds N` sets the number of seeds; `python3 run.py sim` runs single seeds and longer hunts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.sim.mutants import MUTANTS

if TYPE_CHECKING:
    import random

# Mutants that a few hours catch; the others need hundreds: `python3 run.py sim --mutants`.
QUICK = (
    "next-chunk-before-last-is-delivered",
    "whole-batch-acknowledged-after-partial-success",
    "acknowledgement-before-response",
    "routing-change-without-cursor-lock",
    "next-delivery-sent-before-retry",
    "retry-state-only-in-memory",
    "due-schedules-not-locked",
    "feed-begins-again-with-each-leader",
)
QUICK_SEEDS = 40


def sim(*arguments: str | int) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process: the order of sets depends on the hash seed."""
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
def test_no_invariant_is_broken(rng: random.Random, pytestconfig: pytest.Config) -> None:
    seeds: int = pytestconfig.getoption("--sim-seeds")
    first = rng.randrange(10**6) * 1000
    found = sim("--first", first, "--seeds", seeds, "--jobs", 1)
    print(found.stdout, "to trace one: python3 run.py sim --seed N --trace")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
def test_a_seed_is_deterministic(rng: random.Random) -> None:
    seed = rng.randrange(10**9)
    first, second = (sim("--seed", seed, "--trace") for _ in range(2))
    assert first.stdout == second.stdout
    assert "Result(" in first.stdout, first.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_caught(name: str, rng: random.Random) -> None:
    first = rng.randrange(10**6) * 1000
    found = sim("--mutant", name, "--first", first, "--seeds", QUICK_SEEDS, "--jobs", 1)
    assert found.returncode == 1, f"{name} was not caught from seed {first} on"


def test_every_mutant_has_a_docstring() -> None:
    assert all(change.__doc__ for change in MUTANTS.values())
