"""Known mistakes, each alone: the simulation must catch every one of them.

A mutant replaces a function of the relay, or a step of a simulated store, by a version
with a plausible mistake.  Each run has a process of its own, so no mutant is undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.simulation import Simulation

MUTANTS: dict[str, Callable[[Simulation], None]] = {}


def mutant(change: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    """Register a mutant under its name."""
    MUTANTS[change.__name__.replace("_", "-")] = change
    return change


def swap(owner: Any, name: str, new: Any) -> None:
    """Replace a method or a function.

    A step of a simulated store is looked up in its module whenever a method executes it.
    """
    assert hasattr(owner, name), name
    setattr(owner, name, new)
