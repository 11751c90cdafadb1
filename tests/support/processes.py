"""Inspection of real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run; an unreaped zombie does not."""
    return [each for each in processes if _runs(each)]


def command_line(process: psutil.Process) -> list[str]:
    """The program and the arguments of a process; nothing if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
