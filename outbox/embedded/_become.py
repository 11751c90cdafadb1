"""python _become.py PARENT UID GID PROGRAM ARG...: turn into PROGRAM.

Run as a script by `launch.command`; nothing imports it.  UID -1 keeps the
user.  The order matters: the kernel forgets the parent-death signal when the
user changes, and a parent that died before it was asked for sends none.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent, uid, gid = (int(word) for word in sys.argv[1:4])
    program = sys.argv[4:]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # SIGINT is PostgreSQL's fast shutdown.
        try:
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        except (ImportError, OSError, AttributeError):
            pass  # A Python without ctypes: orphans are then swept by the next start.
    if os.getppid() != parent:
        sys.exit("FATAL:  the process that started this one is gone")
    # Python ignores SIGPIPE, and what is ignored stays so through exec.
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    os.execv(program[0], program)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"FATAL:  {error.strerror}: {sys.argv[4]}")
