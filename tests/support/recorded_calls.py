"""The calls of the product's functions, recorded while a test runs."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = f"{Path(outbox.__file__).parent}/"


class RecordedCall(NamedTuple):
    """A call of a function, or the resumption of a coroutine or generator."""

    module: str
    """The path of the module below `outbox/`."""
    function: str
    """The qualified name of the function."""


@contextmanager
def recorded_calls() -> Iterator[list[RecordedCall]]:
    """Record the calls of this thread, and of the threads that start meanwhile, in their order.

    Yields:
        What was called so far; a test may clear it.
    """
    calls: list[RecordedCall] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            module = frame.f_code.co_filename.removeprefix(PACKAGE)
            calls.append(RecordedCall(module, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
