"""Each simulated store has the methods of the real one, and `agreement` compares all of them."""

from __future__ import annotations

import inspect
import random
import re
import sys
from dataclasses import fields
from types import FunctionType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.relay.cluster.stores import Stores
from tests.sim import stores
from tests.sim.agreement import REAL_PACKAGES, Script, modules_of
from tests.sim.test_agreement import SETTINGS, STEPS, SimulatedSide, run_outside
from tests.support import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REAL, SIMULATED = modules_of(*REAL_PACKAGES), modules_of("tests.sim.stores")
NOT_SIMULATED = {
    "PartitionStore.drop_owned",
    "PartitionStore.partitions",
    # No simulated process lacks resources, and no simulated application refuses rows.
    "EndpointStateStore.journal_condition",
    # Of brokers, which tests/models/broker_protocol.py simulates.
    "LaneStore.delivery_at",
    "LaneStore.identity",
    "LaneStore.lost_deliveries",
    "LaneStore.repair",
    "RecordStore.journal_refill",
    "RecordStore.write_end",
    "RecordStore.write_found",
    "RecordStore.write_receipts",
    "RecordStore.write_repaired",
}
"""Methods that no simulated relay calls."""
SCRIPTS_MAX = 100
COVERING_SEEDS = (0, 2, 6, 53)
"""Scripts that call everything, as of now; if they no longer do, more are played."""


def store_classes() -> Iterator[tuple[type, type]]:
    """Each store that is simulated, the real one first."""
    for name, module in vars(SIMULATED).items():
        for class_name, simulated in vars(module).items():
            real = getattr(vars(REAL)[name], class_name, None)
            if class_name.endswith("Store") and simulated.__module__ == module.__name__:
                assert real is not None, class_name
                yield real, simulated


def methods_of(store: type) -> dict[str, Callable[..., Any]]:
    """Public methods that are defined in the class itself."""
    named = vars(store).items()
    return {k: v for k, v in named if isinstance(v, FunctionType) and not k.startswith("_")}


def commands() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Each function of a module that is simulated, the real one first."""
    for name, module in vars(SIMULATED).items():
        for function_name, simulated in vars(module).items():
            real: Any = getattr(vars(REAL)[name], function_name, None)
            # The steps are not asynchronous.
            pair = _is_command(real, REAL, name) and _is_command(simulated, SIMULATED, name)
            if pair and not function_name.startswith("_"):
                yield f"{name}.{function_name}", real, simulated


def _is_command(found: Any, package: Any, name: str) -> bool:
    """Whether it is an asynchronous function that this module defines."""
    if not isinstance(found, FunctionType) or found.__module__ != vars(package)[name].__name__:
        return False
    function = inspect.unwrap(found)
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def parameters_of(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Names, kinds and defaults; mypy compares the types."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


PAIRS = {real.__name__: (real, simulated) for real, simulated in store_classes()}
COMMANDS = {name: (real, simulated) for name, real, simulated in commands()}


def test_every_store_of_a_relay_is_simulated() -> None:
    for each in fields(Stores):
        simulated = getattr(stores.STORES, each.name)
        assert simulated is not each.default, each.name
        assert simulated.__module__.startswith(stores.__name__)


def test_the_simulation_knows_no_statement() -> None:
    sql = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE)\b")
    for module in vars(SIMULATED).values():
        found = [k for k, v in vars(module).items() if isinstance(v, str) and sql.search(v)]
        assert not [name for name in found if not name.startswith("__")], module.__name__


@pytest.mark.parametrize("name", PAIRS)
def test_a_simulated_store_has_all_methods_with_their_signatures(name: str) -> None:
    real, simulated = PAIRS[name]
    ours, theirs = methods_of(simulated), methods_of(real)
    assert {f"{name}.{each}" for each in theirs.keys() - ours.keys()} <= NOT_SIMULATED
    assert not ours.keys() - theirs.keys()
    assert parameters_of(simulated) == parameters_of(real)
    for each in ours:
        assert parameters_of(ours[each]) == parameters_of(theirs[each]), each


@pytest.mark.parametrize("name", COMMANDS)
def test_a_simulated_command_has_the_signature_of_the_real_one(name: str) -> None:
    real, simulated = COMMANDS[name]
    assert parameters_of(simulated) == parameters_of(real)


@pytest.mark.full
@pytest.mark.slow
def test_the_scripts_of_the_agreement_call_everything_that_is_simulated() -> None:
    wanted = {f"{name}.{each}": f for name, (_, s) in PAIRS.items() for each, f in _own(s)}
    wanted |= {name: simulated for name, (_, simulated) in COMMANDS.items()}
    codes = {inspect.unwrap(function).__code__: name for name, function in wanted.items()}
    called = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            called.add(codes[frame.f_code])

    missing = set(wanted)
    for seed in dict.fromkeys((*COVERING_SEEDS, *range(SCRIPTS_MAX))):
        if not missing:
            break
        rng = random.Random(seed)
        endpoint_ids = [UUID(int=rng.getrandbits(128)) for _ in SETTINGS]
        key_hashes = {f"k{n}": rng.getrandbits(62) for n in range(4)}
        side = SimulatedSide(endpoint_ids, key_hashes)
        playing = side.process.run(Script(side, rng).play(STEPS))
        sys.setprofile(note)
        try:
            with ranges.unpaced(3):
                run_outside(side.world, playing)
        finally:
            sys.setprofile(None)
        playing.result()
        missing = set(wanted) - called
    assert not missing


def _own(store: type) -> list[tuple[str, Callable[..., Any]]]:
    return list(methods_of(store).items())
