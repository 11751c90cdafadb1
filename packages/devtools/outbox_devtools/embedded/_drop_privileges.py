"""python _drop_privileges.py PARENT UID GID PROGRAM ARG...: change the user and exec PROGRAM.

Run as a script by `launch.command`; nothing imports it.  UID -1 keeps the user.  The order
matters: the kernel clears the parent-death signal (PR_SET_PDEATHSIG) when the user changes,
and sends none for a parent that died before it was set.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # As in typing, whose import costs more than everything else here.
if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent, uid, gid = (int(word) for word in sys.argv[1:4])
    program = sys.argv[4:]
    prctl = find_prctl()
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)  # PostgreSQL's fast shutdown.
    if os.getppid() != parent:
        sys.exit("FATAL:  the process that started this one is gone")
    # Python ignores SIGPIPE, and exec preserves ignored signals.
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    os.execv(program[0], program)


def find_prctl() -> Callable[..., int] | None:
    """Return prctl(2), or None on other systems and without ctypes.

    Called before the user changes: the new user may not be able to read Python's files.
    """
    try:
        import ctypes

        return ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    except (ImportError, OSError, AttributeError):
        return None


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"FATAL:  cannot start {sys.argv[4]} as uid {sys.argv[2]}: {error.strerror}")
