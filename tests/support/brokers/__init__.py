"""Brokers for tests: real servers on loopback."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Stop a process; when this returns, none of its threads runs any more."""
    process.send_signal(signal.SIGSTOP)
    # The signal takes effect later, and a server responds within microseconds.
    while not all(map(_is_stopped, Path(f"/proc/{process.pid}/task").iterdir())):
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
