"""Those who take turns, what was found, and why somebody was not measured."""

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
"""How long the last ones may still be counted after whoever sent them ended."""


@dataclass(slots=True)
class Turns:
    """Samples by name, but not of those who could not be measured once."""

    stage: Stage
    section: str
    unit: str
    found: Rounds = field(default_factory=Rounds)
    _why_not: dict[str, str] = field(default_factory=dict)

    def those_left(self, contestants: Iterable[Contestant]) -> Iterator[Contestant]:
        """Those who could be measured so far."""
        return (each for each in contestants if each.name not in self._why_not)

    @contextmanager
    def unless_it_cannot(self, contestant: Contestant) -> Iterator[None]:
        """A turn of one who may turn out not to be able to take it."""
        try:
            yield
        except CannotRun as error:
            self._why_not[contestant.name] = str(error)
            self.stage.say(f"{self.section}, {contestant.name}: not measured: {error}")

    def tell(self, number: int, rounds: int) -> None:
        """Say what the round brought."""
        last = {name: figure(each[-1], self.unit) for name, each in self.found.values.items()}
        told = ", ".join(f"{name} {each}" for name, each in last.items())
        self.stage.say(f"{self.section}, round {number + 1} of {rounds}: {told}")

    def row(self, what: str, ours: str, beside: str, sample: str, target: Target | None) -> Row:
        """Our sample beside that of `beside`."""
        row = Row(self.section, what, self.unit, self.found.of(ours), beside, target=target)
        if beside in self._why_not:
            return replace(row, why_not=self._why_not[beside])
        return replace(row, beside=self.found.of(sample))


async def unless_ended(
    who: str, answer: Coroutine[Any, Any, T], ended: Coroutine[Any, Any, int]
) -> T:
    """The answer, unless whoever it depends on ends before.

    Raises:
        CannotRun: it ended, or it takes far too long.
    """
    answered, end = asyncio.create_task(answer), asyncio.create_task(ended)
    try:
        async with asyncio.timeout(ROUND_S):
            await asyncio.wait((answered, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                await asyncio.wait((answered,), timeout=LAST_S)
        if answered.done():
            return answered.result()
        raise CannotRun(f"{who} ended before all had come; its words are above")
    except TimeoutError:
        raise CannotRun(f"{who} did not get through within {ROUND_S:g} s") from None
    finally:
        answered.cancel()
        end.cancel()
