"""The hunt: thousands of virtual hours with faults.

  python3 run.py sim --seeds 10000           check all invariants for ten thousand hours
  python3 run.py sim --seed 42 --trace       one seed, with a log of its steps
  python3 run.py sim --mutants               each mutant until it is caught
  python3 run.py sim --mutant NAME --seed 7 --trace

Exit code 1: an invariant was broken, or a mutant was not caught.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys

import structlog

from tests.sim import hunt
from tests.sim.mutants import MUTANTS


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 run.py sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print a log")
    parser.add_argument(
        "--seeds", type=int, help="number of seeds (default: 100; with mutants 1000)"
    )
    parser.add_argument("--first", type=int, help="the first seed (default: random)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    parser.add_argument("--mutant", metavar="NAME", help="run with this mutant")
    parser.add_argument("--mutants", action="store_true", help="run each mutant until it is caught")
    chosen = parser.parse_args()
    if chosen.mutant is not None and chosen.mutant not in MUTANTS:
        known = "\n  ".join(sorted(MUTANTS))
        parser.error(f"there is no mutant {chosen.mutant!r}; there are\n  {known}")
    _set_logging(logging.INFO if chosen.trace else logging.CRITICAL)
    if chosen.seed is not None:
        return _one(chosen.seed, chosen.mutant, print if chosen.trace else None)
    first = random.randrange(10**6) * 1000 if chosen.first is None else chosen.first
    count = chosen.seeds or (1000 if chosen.mutants or chosen.mutant else 100)
    print(f"{count} seeds from {first} on, {chosen.jobs} at a time", flush=True)
    seeds = range(first, first + count)
    if chosen.mutants:
        return _mutants(seeds, chosen.jobs)
    return _many(seeds, chosen.jobs, chosen.mutant)


def _set_logging(level: int) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
    )


def _one(seed: int, mutant: str | None, log: object) -> int:
    result = hunt.run_one(seed, mutant, log)  # type: ignore[arg-type]
    print(result)
    sys.stdout.flush()
    os._exit(not result.good)


def _many(seeds: range, jobs: int, mutant: str | None) -> int:
    def progress(so_far: hunt.Totals) -> None:
        for result in so_far.bad[shown[0] :]:
            print(f"seed {result.seed}: {result.violations[0]}", flush=True)
            shown[0] += 1
        if so_far.seeds % 100 == 0:
            rate = so_far.seeds / so_far.seconds
            left_s = (len(seeds) - so_far.seeds) / rate
            print(
                f"{so_far.seeds} of {len(seeds)} seeds, {rate:.1f}/s, {left_s:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    shown = [0]
    found = hunt.totals(seeds, jobs, mutant, on_result=progress, until_caught=mutant is not None)
    print(
        f"{found.seeds} virtual hours in {found.seconds:.0f} s: {found.events} events, "
        f"{found.requests} requests ({found.duplicates} duplicates), {found.faults} faults, "
        f"{found.take_overs} changes of ownership, {found.statements} statements, "
        f"{found.steps} steps, {found.proof_aborts} aborts by the proof of absence; feeds: "
        f"{', '.join(f'{n} {what}' for what, n in sorted(found.feeds.items()))}; "
        f"{len(found.bad)} with a violation"
    )
    if mutant is not None:
        return any(result.broken for result in found.bad)
    return bool(found.bad)


def _mutants(seeds: range, jobs: int) -> int:
    missed = 0
    for name in MUTANTS:
        found = hunt.totals(seeds, jobs, name, until_caught=True)
        caught = next((result for result in found.bad if result.broken), None)
        if caught is not None:
            what = str(caught.broken[0])[:150]
            print(f"{name}: seed {caught.seed} ({found.seconds:.0f} s): {what}", flush=True)
        else:
            missed += 1
            print(f"{name}: NOT CAUGHT in {found.seeds} seeds", flush=True)
            if found.bad:  # It does not fit the code any more.
                print(found.bad[-1].violations[-1], file=sys.stderr, flush=True)
    return bool(missed)


if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets of strings depends on it; runs must be repeatable.
    os.execve(  # noqa: S606 (this program again)
        sys.executable,
        [sys.executable, "-m", "tests.sim", *sys.argv[1:]],
        {**os.environ, "PYTHONHASHSEED": "0"},
    )
sys.exit(main())
