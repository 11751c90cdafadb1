"""The sweep removes abandoned directories, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox_devtools.embedded.tempdir import PREFIX, ServerDirectory, remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A path that is short enough for a Unix socket, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="rooms-") as path:
        yield Path(path).resolve()


def abandoned(base: Path) -> Path:
    """Create the directory that a process leaves behind when it does not clean up."""
    program = (
        "import os, pathlib, sys; from outbox_devtools.embedded.tempdir import ServerDirectory\n"
        "room = ServerDirectory(None, pathlib.Path(sys.argv[1]))\n"
        "(room.path / 'data').mkdir(); (room.path / 'data' / 'file').touch()\n"
        "print(room.path, flush=True); os._exit(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(base)], stdout=subprocess.PIPE, text=True, check=True
    )
    return base / os.path.basename(ended.stdout.strip())  # noqa: PTH119


@pytest.mark.system
def test_the_directory_of_a_dead_owner_is_swept(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    assert (path / "data" / "file").exists()
    remove_abandoned(tmp_path)
    assert not path.exists()


def test_the_directory_of_a_running_owner_is_kept(tmp_path: Path) -> None:
    room = ServerDirectory(None, tmp_path)
    (room.path / "data").mkdir()
    remove_abandoned(tmp_path)
    assert (room.path / "data").exists()
    room.remove()
    assert not room.path.exists()


def test_other_directories_are_kept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}new").mkdir()  # The owner is about to lock it.
    remove_abandoned(tmp_path)
    assert (elsewhere / "owner").exists()
    assert (tmp_path / f"{PREFIX}file").exists()
    assert (tmp_path / f"{PREFIX}new").exists()


def test_an_old_directory_that_was_never_locked_is_swept(tmp_path: Path) -> None:
    path = tmp_path / f"{PREFIX}old"
    path.mkdir()
    os.utime(path, (0, 0))
    remove_abandoned(tmp_path)
    assert not path.exists()


@pytest.mark.system
def test_a_link_inside_is_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    path = abandoned(tmp_path)
    (path / "data" / "link").symlink_to(precious)
    (path / "link").symlink_to(precious)
    remove_abandoned(tmp_path)
    assert not path.exists()
    assert (precious / "file").exists()
