"""Virtual hours full of faults, and mistakes that they must reveal.

`--sim-seeds N` makes it a long hunt; `python3 run.py sim` says more about one.
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

# Those that a few hours reveal; the others take hundreds: `python3 run.py sim --mutants`.
QUICK = (
    "a-helping-on-top-of-the-last",
    "a-batch-acknowledged-whole-when-a-part-was-accepted",
    "acknowledge-before-the-answer",
    "disabling-an-endpoint-without-the-cursor-row",
    "next-number-sent-while-the-head-waits-to-be-retried",
    "retry-state-only-in-memory",
    "schedules-that-every-replica-looks-at-without-a-lock",
)
QUICK_SEEDS = 40


def sim(*arguments: str | int) -> subprocess.CompletedProcess[str]:
    """The hunt's command, in a process of its own: hashes of texts decide about orders."""
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )


def test_no_invariant_is_broken_in_some_virtual_hours(
    rng: random.Random, pytestconfig: pytest.Config
) -> None:
    seeds: int = pytestconfig.getoption("--sim-seeds")
    first = rng.randrange(10**6) * 1000
    found = sim("--first", first, "--seeds", seeds, "--jobs", 1)
    print(found.stdout, "to look at one: python3 run.py sim --seed N --trace")
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_seed_says_everything_that_happens(rng: random.Random) -> None:
    seed = rng.randrange(10**9)
    first, second = (sim("--seed", seed, "--trace") for _ in range(2))
    assert first.stdout == second.stdout
    assert "Result(" in first.stdout, first.stderr


@pytest.mark.parametrize("name", QUICK)
def test_a_known_mistake_is_noticed(name: str, rng: random.Random) -> None:
    first = rng.randrange(10**6) * 1000
    found = sim("--mutant", name, "--first", first, "--seeds", QUICK_SEEDS, "--jobs", 1)
    assert found.returncode == 1, f"{name} went unnoticed from seed {first} on"


def test_every_mistake_says_what_it_is() -> None:
    assert all(change.__doc__ for change in MUTANTS.values())
