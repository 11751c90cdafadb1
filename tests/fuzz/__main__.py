"""The fuzzer: a hunt for inputs that break an invariant, guided by code coverage.

  python -m tests.fuzz                                   every target, 20 seconds each
  python -m tests.fuzz --target responses --seconds 600    one, for ten minutes
  python -m tests.fuzz --runs 100000 --seed 7 --json     the same inputs each time
  python -m tests.fuzz --target cron --input FILE        one input again, with a traceback

An input that breaks an invariant is stored in .fuzz/findings, and the command that reproduces
it is printed. Inputs that reached new code are stored in .fuzz/corpus, and the next hunt begins
with them. Trying an input needs no atheris; hunting does: pip install 'outbox-relay[fuzz]'.

Exit code 1: an invariant was broken. 2: wrong usage. 3: the fuzzer cannot run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fuzz import hunting
from tests.fuzz.hunting import CannotFuzz, Hunt
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.targets import NAMES, TARGETS, load

SECONDS = 20.0


def main() -> int:
    """Run the command line and return the exit code."""
    targets = "\n".join(f"  {name:<13} {what}" for name, (_, what) in TARGETS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=f"{__doc__}\nTargets and their invariants:\n{targets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", action="append", metavar="NAME", help="only this target; repeatable")
    add("--runs", type=int, metavar="N", help="number of inputs per target")
    add("--seconds", type=float, metavar="S", help=f"duration per target; default: {SECONDS:.0f}")
    add("--seed", type=int, metavar="N", help="random seed; default: a new one each time")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of parallel targets",
    )
    add("--fresh", action="store_true", help="begin with the seeds, without the stored corpus")
    add("--input", type=Path, metavar="FILE", help="with --target: try the input in this file")
    add("--kept", type=Path, metavar="DIR", help="directory of the corpus and the findings")
    add(
        "--mistake",
        metavar="NAME",
        help="apply this mistake to the product; see tests/fuzz/mistakes.py",
    )
    add("--seeds", action="store_true", help="try only the seeds, without atheris")
    add("--json", action="store_true", help="one line of JSON on stdout")
    chosen = parser.parse_args()
    names = chosen.target or list(NAMES)
    for name in names:
        if name not in NAMES:
            parser.error(f"there is no target {name!r}; there are {', '.join(NAMES)}")
    if chosen.mistake is not None and chosen.mistake not in MISTAKES:
        parser.error(f"there is no mistake {chosen.mistake!r}; there are {', '.join(MISTAKES)}")
    if chosen.input is not None:
        if len(names) != 1:
            parser.error("--input is for one target; say which with --target")
        try:
            inputs = [chosen.input.read_bytes()]
        except OSError as error:
            parser.error(f"--input {chosen.input}: {error.strerror}")
        return _try(names, chosen.mistake, inputs)
    if chosen.seeds:
        return _try(names, chosen.mistake)
    if importlib.util.find_spec("atheris") is None:
        say("atheris is not installed; on Linux: pip install 'outbox-relay[fuzz]'")
        return 3
    seed = int.from_bytes(os.urandom(3)) if chosen.seed is None else chosen.seed
    seconds = chosen.seconds if chosen.runs or chosen.seconds else SECONDS
    say(f"{len(names)} targets, {chosen.jobs} at a time; to repeat it: --seed {seed} --fresh")
    how = {"seed": seed, "runs": chosen.runs, "seconds": seconds, "mistake": chosen.mistake}
    try:
        with ExitStack() as stack:
            kept = chosen.kept or hunting.KEPT
            begin = kept
            if chosen.fresh:
                begin = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hunts = [hunting.keep(h, kept) for h in _hunt(names, chosen.jobs, how, begin)]
    except CannotFuzz as error:
        say(str(error))
        return 3
    if chosen.json:
        print(json.dumps({"seed": seed, "targets": [each.as_json() for each in hunts]}))
    else:
        _show(hunts)
    return int(any(each.input is not None for each in hunts))


def _try(names: list[str], mistake: str | None, inputs: list[bytes] | None = None) -> int:
    """Try inputs or the seeds in this process; an exception means a finding."""
    for name in names:
        target = load(name)
        target.prepare()
        if mistake is not None:
            MISTAKES[mistake][1]()
        tried = list(target.seeds) if inputs is None else inputs
        for each in tried:
            target.one(each)
        print(f"{name}: everything holds for {len(tried)} inputs")
    return 0


def _hunt(names: list[str], jobs: int, how: dict[str, Any], kept: Path) -> list[Hunt]:
    began_at = time.monotonic()
    done = 0

    def one(name: str) -> Hunt:
        nonlocal done
        found = hunting.hunt(name, kept=kept, **how)
        done += 1
        went_s = time.monotonic() - began_at
        say(f"{done} of {len(names)}, {went_s:.0f} s: {name}: {found.inputs:,} inputs")
        if found.input is not None:
            say(f"\n{found.output}\n")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, names))


def _show(hunts: list[Hunt]) -> None:
    print(f"{'target':<13} {'inputs':>11} {'edges':>7}  finding")
    for each in hunts:
        finding = "none" if each.input is None else each.error[:120]
        print(f"{each.target:<13} {each.inputs:>11,} {each.edges:>7,}  {finding}")
    for each in hunts:
        if each.input is not None:
            print(
                f"\nto try it once more:\n"
                f"  python -m tests.fuzz --target {each.target} --input {each.input}"
            )


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
