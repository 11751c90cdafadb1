"""A small disk: a file system of a few megabytes, which only root can mount."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = bytes(1 << 16)


class SmallDisk:
    """A mounted file system, and a file that fills it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ballast = directory / "ballast"

    def fill(self) -> None:
        """Fill the remaining space, to the last byte."""
        with self._ballast.open("ab", buffering=0) as file:
            size = len(_CHUNK)
            while size:
                try:
                    file.write(_CHUNK[:size])
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Release the space."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(megabytes: int) -> Iterator[SmallDisk]:
    """Mount a file system for the length of the block.

    Raises:
        OSError, subprocess.SubprocessError: mounting is not permitted here.
    """
    with tempfile.TemporaryDirectory(prefix="small-disk-") as name:
        options = f"size={megabytes}m,mode=0711"
        mount = ["mount", "-t", "tmpfs", "-o", options, "outbox-test", name]
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
        try:
            yield SmallDisk(Path(name))
        finally:
            subprocess.run(["umount", "--lazy", name], check=True, capture_output=True)  # noqa: S607 (root's own path)


@cache
def may_mount() -> bool:
    """Whether this process may mount file systems."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    try:
        with small_disk(1):
            return True
    except (OSError, subprocess.SubprocessError):
        return False
