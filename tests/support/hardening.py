"""The hardening that the documents recommend, on this machine and without Docker and systemd.

`Sandbox` has what `docker run --read-only --cap-drop ALL` and the units of `deploy/` ask for: a
root file system with the program and its libraries, which cannot be written and has no /tmp; a user
without files and without capabilities; a /proc of its own processes.  `Trace` is what strace has
recorded there, to be compared with the filters of a unit.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support.checkout import ROOT
from tests.support.process import TIMEOUT_S, command_line, environment
from tests.support.small_disk import may_mount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

USER = 65532
"""That of the image."""
_SYSTEM = [each for each in ("/usr", "/bin", "/lib", "/lib64", "/etc") if Path(each).exists()]
_DEVICES = ("null", "zero", "random", "urandom")
# Runs in a mount namespace of its own.  $1: an empty directory for the root; $2: paths that are in
# it, one a line; $3: a file for what strace records, or nothing; then the command.
_RUN = f"""
set -e
root=$1 paths=$2 trace=$3
shift 3
umask 022
mount -t tmpfs -o mode=755 root "$root"
printf '%s\\n' "$paths" | while read -r path; do
    if [ -L "$path" ]; then cp -P "$path" "$root$path"; continue; fi
    mkdir -p "$root$path"
    mount --bind -o ro "$path" "$root$path"
done
mkdir "$root/proc" "$root/dev"
mount -t proc -o subset=pid,hidepid=invisible proc "$root/proc"
for device in {" ".join(_DEVICES)}; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -o remount,ro "$root"
if [ -n "$trace" ]; then
    exec 3> "$trace"
    set -- strace -D -f -qq -s 0 -e signal=none -o '|cat >&3' "$@"
fi
exec chroot "$root" setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all \\
    --inh-caps=-all --no-new-privs --pdeathsig KILL "$@"
"""
_SYSTEM_CALL = re.compile(r"^\d+ +(\w+)\((.*)", re.MULTILINE)
_ALWAYS = "@default"
"""Calls that systemd always allows beside a list of allowed ones."""


def can_harden() -> bool:
    """Whether this process can make a `Sandbox`."""
    programs = ("unshare", "chroot", "setpriv")
    return may_mount() and all(shutil.which(each) is not None for each in programs)


class Sandbox:
    """Runs `outbox` with the hardening.

    Args:
        directory: an empty one.
    """

    def __init__(self, directory: Path) -> None:
        self._root = directory / "root"
        self._root.mkdir()
        self._directory = directory

    async def _start(
        self, words: Sequence[str], env: Mapping[str, str], trace: Path | None, log: int | None
    ) -> asyncio.subprocess.Process:
        paths = "\n".join((*_SYSTEM, sys.base_prefix, str(ROOT), sys.prefix))
        argv = [
            *(shutil.which("unshare") or "", "--mount", "--propagation", "private"),
            *("sh", "-c", _RUN, "sandbox", str(self._root), paths, str(trace or "")),
            *command_line(*words),
        ]
        return await asyncio.create_subprocess_exec(
            *argv,
            env=environment(env) | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=log or asyncio.subprocess.PIPE,
            stderr=log or asyncio.subprocess.PIPE,
        )

    async def run(
        self, *words: str, env: Mapping[str, str], stdin: str = "", trace: Path | None = None
    ) -> str:
        """Run a command to its end; returns its output."""
        process = await self._start(words, env, trace, None)
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode == 0, f"{words}: {err.decode()}"
        return out.decode()

    @asynccontextmanager
    async def serving(
        self, *words: str, env: Mapping[str, str], trace: Path | None = None
    ) -> AsyncIterator[Served]:
        """Run a command that serves; it ends with the block, by SIGTERM."""
        path = self._directory / f"{words[0]}.log"
        with path.open("ab") as log:
            process = await self._start(words, env, trace, log.fileno())
        served = Served(process, path)
        try:
            yield served
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT_S):
                assert await process.wait() == 0, path.read_text()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@dataclass(frozen=True)
class Served:
    """A process that serves, and its children."""

    process: asyncio.subprocess.Process
    log: Path

    def peak_bytes(self) -> int:
        """The sum of the most memory that each process has had so far."""
        parent = psutil.Process(self.process.pid)
        peak = 0
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                if each.name() not in ("strace", "cat", "sh"):
                    status = Path(f"/proc/{each.pid}/status").read_text()
                    (found,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
                    peak += int(found) * 1024
        return peak


class Trace:
    """System calls, as strace has recorded them."""

    def __init__(self, path: Path) -> None:
        self._made = _SYSTEM_CALL.findall(path.read_text(errors="replace"))

    def names(self) -> set[str]:
        return {name for name, _ in self._made}

    def families(self) -> set[str]:
        """Address families of the sockets."""
        sockets = (arguments for name, arguments in self._made if name == "socket")
        return {each.partition(",")[0] for each in sockets}

    def executable(self) -> list[str]:
        """Memory that MemoryDenyWriteExecute= does not allow: systemd.exec(5).

        It is writable and executable, or becomes executable later.
        """
        return [
            f"{name}({arguments}"
            for name, arguments in self._made
            if (name == "mmap" and "PROT_WRITE" in arguments and "PROT_EXEC" in arguments)
            or (name in ("mprotect", "pkey_mprotect") and "PROT_EXEC" in arguments)
            or (name == "shmat" and "SHM_EXEC" in arguments)
        ]


@cache
def _groups() -> Mapping[str, frozenset[str]]:
    """What systemd's groups of system calls have, other groups included, by their names."""
    text = subprocess.run(
        ["systemd-analyze", "syscall-filter"],  # noqa: S607
        capture_output=True, text=True, check=True, env={**os.environ, "SYSTEMD_PAGER": ""},
    ).stdout  # fmt: skip
    listed: dict[str, set[str]] = {}
    for line in text.splitlines():
        word = line.strip()
        if line.startswith("@"):
            listed[name := word] = set()
        elif word and not word.startswith("#") and line.startswith(" "):
            listed[name].add(word)

    def expand(name: str) -> frozenset[str]:
        return frozenset().union(
            *(expand(each) if each.startswith("@") else {each} for each in listed[name])
        )

    return {name: expand(name) for name in listed}


def settings(unit: Path, name: str) -> list[str]:
    """The values of a setting of a unit, in their order."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def allowed_calls(unit: Path) -> set[str]:
    """The system calls that a unit's filter allows: systemd.exec(5)."""
    allowed = set(_groups()[_ALWAYS])
    for value in settings(unit, "SystemCallFilter"):
        removes = value.startswith("~")
        for word in value.removeprefix("~").split():
            calls = _groups()[word] if word.startswith("@") else {word}
            allowed = allowed - calls if removes else allowed | calls
    return allowed
