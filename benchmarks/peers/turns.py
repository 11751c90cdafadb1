"""Alternating contestants, their samples, and why some could not be measured."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.figures import Rounds, Row
from benchmarks.report import figure
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

    from benchmarks.figures import Target
    from benchmarks.peers.contestants import Contestant
    from benchmarks.stage import Stage

T = TypeVar("T")

ROUND_S = 240.0
LAST_S = 5.0
"""Seconds to wait for the last requests after their sender has ended."""


@dataclass(slots=True)
class Turns:
    """Samples by contestant; a contestant that failed once is excluded."""

    stage: Stage
    section: str
    unit: str
    found: Rounds = field(default_factory=Rounds)
    _missing_reason: dict[str, str] = field(default_factory=dict)

    def remaining(self, contestants: Iterable[Contestant]) -> Iterator[Contestant]:
        """The contestants that could be measured so far."""
        return (each for each in contestants if each.name not in self._missing_reason)

    @contextmanager
    def turn(self, contestant: Contestant) -> Iterator[None]:
        """Run a turn, and exclude its contestant if it fails with CannotRun."""
        try:
            yield
        except CannotRun as error:
            self._missing_reason[contestant.name] = str(error)
            self.stage.say(f"{self.section}, {contestant.name}: not measured: {error}")

    def print_round(self, number: int, rounds: int) -> None:
        """Print the results of the round."""
        last = {name: figure(each[-1], self.unit) for name, each in self.found.values.items()}
        described = ", ".join(f"{name} {each}" for name, each in last.items())
        self.stage.say(f"{self.section}, round {number + 1} of {rounds}: {described}")

    def row(self, what: str, ours: str, baseline: str, sample: str, target: Target | None) -> Row:
        """Return a row of our sample and that of `beside`."""
        row = Row(
            self.section, what, self.unit, self.found.samples_of(ours), baseline, target=target
        )
        if baseline in self._missing_reason:
            return replace(row, missing_reason=self._missing_reason[baseline])
        return replace(row, baseline=self.found.samples_of(sample))


async def unless_ended(
    who: str, response: Coroutine[Any, Any, T], ended: Coroutine[Any, Any, int]
) -> T:
    """Return the response, unless its process ends before.

    Raises:
        CannotRun: The process ended, or it takes far too long.
    """
    completion, end = asyncio.create_task(response), asyncio.create_task(ended)
    try:
        async with asyncio.timeout(ROUND_S):
            await asyncio.wait((completion, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                await asyncio.wait((completion,), timeout=LAST_S)
        if completion.done():
            return completion.result()
        raise CannotRun(f"{who} ended before all requests had arrived; see its output above")
    except TimeoutError:
        raise CannotRun(f"{who} did not finish within {ROUND_S:g} s") from None
    finally:
        completion.cancel()
        end.cancel()
