"""`python -m benchmarks.peers MODULE ASKED`: a Python contestant in a separate process."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module

import orjson

from benchmarks.peers.asked import Asked
from benchmarks.receiver import new_event_loop


def main() -> None:
    module, asked = sys.argv[1:]
    contestant = import_module(f"benchmarks.peers.{module}")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(contestant.work(Asked(**orjson.loads(asked))))


if __name__ == "__main__":
    main()
