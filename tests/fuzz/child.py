"""Run one target under atheris, in a separate process: `python -m tests.fuzz.child '{…}'`.

The result is in libFuzzer's output. The process exits with a code other than 0 if an invariant does
not hold, and stores the input where `artifact_prefix` points.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import atheris

from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.targets import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fuzz.target import Target

EVERYTHING = ("outbox", "cronsim", "aiohttp.client_proto")
INPUT_S_MAX = 20
"""Time limit of an input in seconds; a slower input is a finding, because it blocks all others."""
MEMORY_MIB_MAX = 2048


def main(
    *,
    name: str,
    kept: str,
    seed: int,
    runs: int | None,
    seconds: float | None,
    mistake: str | None,
) -> None:
    """Fuzz until the limit is reached; does not return.

    Args:
        runs: Number of inputs. None without `seconds`: the target's default.
    """
    # structlog and logging would write a line for most inputs.
    logging.disable(logging.CRITICAL)
    target = load(name)
    target.prepare()
    is_short = runs is None and seconds is None
    _instrument(target.short_run_modules if is_short else EVERYTHING)
    if mistake is not None:
        MISTAKES[mistake][1]()
    if is_short:
        runs = target.runs
    arguments = [
        f"-seed={seed or 1}",  # libFuzzer treats 0 as no seed.
        f"-max_len={target.bytes_max}",
        f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={MEMORY_MIB_MAX}",
        "-print_final_stats=1",
        *([f"-runs={runs}"] if runs is not None else []),
        *([f"-max_total_time={seconds:.0f}"] if seconds is not None else []),
        *_begin(target, Path(kept)),
    ]
    atheris.Setup([sys.argv[0], *arguments], target.one)
    atheris.Fuzz()


def _instrument(prefixes: Sequence[str]) -> None:
    """Instrument the functions of these modules.

    Loaded functions are instrumented, instead of all modules at import, because that takes ten
    seconds when much is imported.
    """
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(tuple(f"{each}." for each in prefixes)):
            continue
        for held in list(vars(module).values()):
            if getattr(held, "__module__", None) == name:
                for function in _functions(held):
                    atheris.instrument_func(function)


def _functions(held: object) -> Iterator[FunctionType]:
    """Return the functions of an object: itself, or its methods."""
    parts = list(vars(held).values()) if isinstance(held, type) else [held]
    for part in parts:
        found = getattr(part, "__func__", getattr(part, "fget", part))
        found = getattr(found, "__wrapped__", found)
        if isinstance(found, FunctionType):
            yield found


def _begin(target: Target, kept: Path) -> list[str]:
    """Return the libFuzzer arguments for the corpus and its directories."""
    seeds, found = kept / "seeds" / target.name, kept / "corpus" / target.name
    broken, words = kept / "findings" / target.name, kept / "seeds" / f"{target.name}.words"
    for directory in (seeds, found, broken):
        directory.mkdir(parents=True, exist_ok=True)
    for i, each in enumerate(target.seeds):
        (seeds / f"{i:03}").write_bytes(each)
    words.write_text(_dictionary(target.words), "ascii")
    return [f"-dict={words}", f"-artifact_prefix={broken}/", str(found), str(seeds)]


def _dictionary(words: Sequence[str | bytes]) -> str:
    """Return the dictionary in libFuzzer's format: a quoted text on each line."""
    raw = [each.encode() if isinstance(each, str) else each for each in words]
    shown = ["".join(f"\\x{byte:02x}" for byte in each) for each in raw]
    return "".join(f'"{each}"\n' for each in shown)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
