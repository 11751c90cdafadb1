"""Many seeds, each in a process of its own, several at a time."""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.sim.books import Violation
from tests.sim.mutants import MUTANTS
from tests.sim.simulation import Result, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass
class Totals:
    """Totals of a hunt."""

    seeds: int = 0
    steps: int = 0
    statements: int = 0
    events: int = 0
    requests: int = 0
    duplicates: int = 0
    faults: int = 0
    take_overs: int = 0
    proof_aborts: int = 0
    feeds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    bad: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        for name in ("steps", "statements", "events", "requests", "duplicates", "faults"):
            setattr(self, name, getattr(self, name) + getattr(result, name))
        self.feeds += result.feeds
        self.take_overs += result.take_overs
        self.proof_aborts += result.proof_aborts
        if not result.good:
            self.bad.append(result)


def run_one(
    seed: int, mutant: str | None = None, on_log: Callable[[str], None] | None = None
) -> Result:
    """Run a seed in this process, which must end afterwards, because no mutant is undone."""
    gc.disable()
    mutate = None if mutant is None else MUTANTS[mutant]
    simulation = Simulation(seed, on_log=on_log, mutate=mutate)
    result = simulation.run()
    # Tasks of killed processes must not be collected: that would run their clean-up.
    _KEPT.append(simulation)
    return result


_KEPT: list[Simulation] = []


def _child(seed: int, mutant: str | None, out: int) -> None:
    try:
        result = run_one(seed, mutant)
    except BaseException:
        text = traceback.format_exc()
        result = Result(seed, (Violation("crash", text),), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    with os.fdopen(out, "wb") as pipe:
        pickle.dump(result, pipe)
    sys.stdout.flush()
    os._exit(0)


def hunt(seeds: Iterable[int], jobs: int, mutant: str | None = None) -> Iterator[Result]:
    """Run seeds; yields the results in the order of completion."""
    gc.collect()
    gc.freeze()
    waiting = iter(seeds)
    selector = selectors.DefaultSelector()
    running: dict[int, tuple[int, bytearray]] = {}

    def start() -> bool:
        seed = next(waiting, None)
        if seed is None:
            return False
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            _child(seed, mutant, theirs)
        os.close(theirs)
        running[ours] = (pid, bytearray())
        selector.register(ours, selectors.EVENT_READ)
        return True

    for _ in range(jobs):
        start()
    try:
        while running:
            for key, _ in selector.select():
                end = key.fd
                pid, data = running[end]
                chunk = os.read(end, 1 << 16)
                if chunk:
                    data += chunk
                    continue
                selector.unregister(end)
                os.close(end)
                os.waitpid(pid, 0)
                del running[end]
                start()
                yield pickle.loads(data)  # noqa: S301 (a child of ours wrote it)
    finally:
        for pid, _ in running.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def totals(
    seeds: Iterable[int],
    jobs: int,
    mutant: str | None = None,
    *,
    on_result: Callable[[Totals], None] = lambda _: None,
    until_caught: bool = False,
) -> Totals:
    """Run seeds; returns the totals."""
    started = time.monotonic()
    found = Totals()
    for result in hunt(seeds, jobs, mutant):
        found.add(result)
        found.seconds = time.monotonic() - started
        on_result(found)
        if until_caught and result.broken:
            break
    return found
