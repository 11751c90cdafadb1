"""Known mistakes, each alone: the simulation must catch every one of them.

A mutant changes the relay's own code, or the answer to one statement, as somebody
could have written it who did not know better.  Each run has a process of its own,
so nothing has to be put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.simulation import Simulation

MUTANTS: dict[str, Callable[[Simulation], None]] = {}


def mutant(change: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    """Registered under its name."""
    MUTANTS[change.__name__.replace("_", "-")] = change
    return change


def swap(owner: Any, name: str, new: Any) -> None:
    """Put something else in the place of a method or function."""
    setattr(owner, name, new)
