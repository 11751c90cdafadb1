"""The server's temporary directory, and the removal of abandoned ones.

    outbox-pg-k3x9/         0700; 0710 for the group of the server's account, if that differs
        owner       locked by the process that created it, for its lifetime
        log         the server's log, which may contain statements; 0600
        run/        the Unix socket; 0700
        data/       the cluster, unless the caller has one; 0700
        install/    a copy of the binaries, if they had to be copied

The lock tells whether the owner is alive.  A pid would not: pids are reused, and have no
meaning in another container that shares the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from outbox_devtools.embedded.run_as_user import Account

PREFIX = "outbox-pg-"
SOCKET_NAME = ".s.PGSQL.5432"
# sockaddr_un.sun_path with its closing zero: 108 bytes on Linux, 104 on BSD and macOS.
SOCKET_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103
# Between making a directory and locking it, no process takes longer than this.
_UNLOCKED_AGE_S = 3600.0


class ServerDirectory:
    """A new directory owned by this process, in `base` or a usual temporary directory.

    Raises:
        CannotRun: no directory is suitable.
    """

    def __init__(self, account: Account | None, base: Path | None = None) -> None:
        self.path, self._owner_fd = _make(_choose(_bases(base), account))
        # mkdtemp made it 0700.  The server's account has to traverse it, but not to list it or
        # to write to it: this process, which may be root, opens files in it by name.
        if account is not None:
            os.chown(self.path, -1, account.gid)
            self.path.chmod(0o710)

    def remove(self) -> None:
        """Remove the directory; never raises."""
        _empty(self.path)
        with contextlib.suppress(OSError):
            (self.path / "owner").unlink()
            self.path.rmdir()
        with contextlib.suppress(OSError):
            os.close(self._owner_fd)


def remove_abandoned(base: Path | None = None) -> None:
    """Remove this user's directories whose owner process is dead.

    A server that outlived its owner (only on kernels without a parent-death signal) stops
    within a minute of losing its files, because postgres checks its postmaster.pid.
    """
    for each in set(_bases(base)):
        with contextlib.suppress(OSError):
            for path in list(each.glob(f"{PREFIX}*")):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(path)


def can_reach(path: Path, account: Account | None) -> bool:
    """Whether `account` may traverse every directory down to `path`."""
    if account is None:
        return True
    return all(_can_traverse(each.stat(), account) for each in [path, *path.parents])


def _can_traverse(found: os.stat_result, account: Account) -> bool:
    if found.st_uid == account.uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == account.gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def _bases(first: Path | None) -> list[Path]:
    """Return the candidate base directories, in order of preference."""
    usual = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108
    return [each.resolve() for each in ([first] if first else []) + usual]


def _choose(bases: list[Path], account: Account | None) -> Path:
    """Return the first base that is short enough for the socket path and traversable."""
    name_bytes = len(os.fsencode(f"/{PREFIX}12345678/run/{SOCKET_NAME}"))
    for base in bases:
        writable = base.is_dir() and os.access(base, os.W_OK | os.X_OK)
        short = len(os.fsencode(base)) + name_bytes <= SOCKET_PATH_BYTES_MAX
        if writable and short and can_reach(base, account):
            return base
    raise CannotRun(
        "no temporary directory is short enough for a Unix socket and accessible to the "
        "server's user: set TMPDIR to one"
    )


def _make(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        owner = path / "owner"
        fd = os.open(owner, os.O_RDWR | os.O_CREAT, 0o600)
        # Another process may have removed the directory as abandoned before the lock.
        if _lock(fd) and owner.exists() and owner.stat().st_ino == os.fstat(fd).st_ino:
            os.write(fd, f"{os.getpid()}\n".encode())
            return path, fd
        os.close(fd)


def _remove_if_abandoned(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    try:
        fd = os.open(path / "owner", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - found.st_mtime > _UNLOCKED_AGE_S:
            shutil.rmtree(path, ignore_errors=True)
        return
    try:
        if _lock(fd):
            _empty(path)
            # Last, so that a partial removal is retried by the next process.
            if [each.name for each in path.iterdir()] == ["owner"]:
                (path / "owner").unlink()
                path.rmdir()
    finally:
        os.close(fd)


def _empty(path: Path) -> None:
    for entry in list(path.iterdir()) if path.is_dir() else []:
        if entry.name == "owner":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _lock(fd: int) -> bool:
    """Acquire the lock; False if a living process holds it."""
    import fcntl  # POSIX only

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
