#!/usr/bin/env python3
"""Sets everything up, once, and runs it.

    python3 run.py demo [ARGS...]      real events out of a real PostgreSQL, proven in order
    python3 run.py test                every check: lint, types, layers, tests
    python3 run.py test [ARGS...]      pytest with these arguments
    python3 run.py sim [ARGS...]       whole relays under every fault, on virtual time
    python3 run.py bench [ARGS...]     speed, latency and memory beside aiohttp's and PostgreSQL's
    python3 run.py outbox ARGS...      any command of outbox, such as: outbox --help
    python3 run.py fuzz [ARGS...]      inputs by the million, guided by the code they reach
    python3 run.py audit               whether what is installed is known to be vulnerable
    python3 run.py pin                 renew the versions that are installed

Needs Python 3.11 or later with pip and nothing else.  The first run makes
.venv beside this file and installs everything there, in the versions that
.ci/constraints.txt has; later runs start at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

PYTHON_MIN = (3, 11)
PIP_MIN = (22, 3)  # The first one with --python.

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# Line 1 is what the environment was made for, line 2 what was installed into it; line 3 is
# there where the pinned versions could not be had.
STAMP = VENV / "run-py-stamp"
UNPINNED = "other versions than pinned"

CHECKS = (
    ("ruff check", "."),
    ("ruff format", "--check", "--quiet", "."),
    ("mypy",),
    ("lint-imports",),
    ("python .ci/audit.py",),
    ("python -m tests.sim", "--seeds", "100"),
    # Four at a time even on two cores: tests wait a good part of their time.  One is handed
    # out after the other, so that all are at work until the end.  What the simulation says
    # was asked just now, of more seeds.
    ("pytest", "-n", "4", "--maxschedchunk", "1", "--sim-seeds", "2"),
)

OK, FAILED, USAGE, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 3, 130


class Stop(Exception):
    """Ends the run with a line for the reader and an exit code."""

    def __init__(self, message: str, exit_code: int = CANNOT_RUN) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__.strip(), file=sys.stderr)
        return USAGE
    command, *rest = arguments
    if command in ("-h", "--help", "help"):
        print(__doc__.strip())
        return OK
    if command not in ("demo", "test", "sim", "bench", "outbox", "fuzz", "audit", "pin"):
        raise Stop(f"there is no command {command!r}; python3 run.py --help lists them", USAGE)
    require_python(sys.version_info[:3])
    if command == "pin":
        return call([sys.executable, str(ROOT / ".ci" / "pin.py"), *find_pip()])
    set_up()
    if command == "test":
        os.chdir(ROOT)
        return become("pytest", *rest) if rest else run_checks()
    if command in ("sim", "bench", "fuzz"):
        os.chdir(ROOT)
        module = {"sim": "tests.sim", "bench": "benchmarks", "fuzz": "tests.fuzz"}[command]
        return become("python", "-m", module, *rest)
    if command == "audit":
        return become("python", str(ROOT / ".ci" / "audit.py"), *rest)
    return become("outbox", *(["demo", *rest] if command == "demo" else rest))


def require_python(version: tuple[int, ...]) -> None:
    if version < PYTHON_MIN:
        need, have = (".".join(map(str, each)) for each in (PYTHON_MIN, version))
        raise Stop(
            f"Python {need} or later is needed, and this is {have}: call me with a later one"
        )


def set_up() -> None:
    """Make the environment and install into it, as far as that is still to be done."""
    wanted = stamp()
    found = STAMP.read_text().splitlines() if STAMP.exists() else []
    works = python_works()
    if works and found[:2] == wanted:
        return
    # An environment without a stamp was made by hand: used, not thrown away.
    # One that is stamped but was not finished, or is for another Python or
    # another place, cannot be trusted.
    if not works or (found and found[0] != wanted[0]):
        make_environment(again=VENV.exists())
    install(wanted)


def stamp() -> list[str]:
    version = ".".join(map(str, sys.version_info[:3]))
    asked = (ROOT / "pyproject.toml").read_bytes()
    pinned = pins().read_bytes() if pins().exists() else b""
    return [f"Python {version} in {ROOT}", hashlib.sha256(asked + pinned).hexdigest()]


def pins() -> Path:
    """The exact versions to install; a package of the sources has none."""
    return ROOT / ".ci" / "constraints.txt"


def python_works() -> bool:
    probe = f"import sys; sys.exit(sys.version_info < {PYTHON_MIN})"
    try:
        return subprocess.run([PYTHON, "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def make_environment(*, again: bool) -> None:
    import venv

    say(
        f"making {VENV}"
        + (" again: it was unfinished, broken or of another Python" if again else "")
    )
    try:
        if VENV.is_symlink() or VENV.is_file():
            VENV.unlink()
        elif again:
            shutil.rmtree(VENV)
        # Without pip, because Debian's Python has no ensurepip; ours installs into it.
        venv.create(VENV, with_pip=False, symlinks=os.name != "nt")
    except (OSError, subprocess.CalledProcessError) as error:
        raise Stop(f"could not make {VENV}: {error}") from error


def install(wanted: list[str]) -> None:
    import tomllib

    pip = [*find_pip(), "--python", str(PYTHON), "--disable-pip-version-check"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = ",".join(project.get("optional-dependencies", {}))
    command = [*pip, "install", "--quiet", "--editable", f"{ROOT}[{extras}]"]
    say("installing what pyproject.toml asks for (a minute the first time)")
    STAMP.write_text("unfinished\n")
    started = time.monotonic()
    stamped = list(wanted)
    code, said = ask_pip(command, pinned=pins().exists())
    if code and pins().exists():
        # An index may not have them, and another Python or machine may have no use for them.
        say("not all of the versions in .ci/constraints.txt can be had here; taking others")
        stamped.append(UNPINNED)
        code, said = ask_pip(command, pinned=False)
    if code:
        sys.stderr.write(said)
        raise Stop(
            f"pip could not install (exit code {code}); its message is above. "
            "It needs a way to the package index: look at the network, or at pip's configuration"
        )
    STAMP.write_text("\n".join(stamped) + "\n")
    say(f"installed in {time.monotonic() - started:.0f} s")


def ask_pip(command: list[str], *, pinned: bool) -> tuple[int, str]:
    """Run pip; its exit code, and its messages, which are shown when it failed only: Ctrl-C
    makes it say a great deal.
    """
    # A user's own pip settings must not send it somewhere else.
    env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    if pinned:
        # By variables, because they also hold for what builds the package; for that a later
        # pip has one of its own, which the others pass over.  A space would end a path.
        env |= dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), pins().as_uri())
    with tempfile.TemporaryFile() as messages:
        code = call(command, env=env, stderr=messages)
        messages.seek(0)
        return code, messages.read().decode(errors="replace")


def find_pip() -> list[str]:
    """The command of a pip that can install into another environment."""
    version: tuple[int, ...] = ()
    for python in (sys.executable, getattr(sys, "_base_executable", sys.executable)):
        asked = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
        if asked.returncode == 0:  # "pip 23.0.1 from ..."
            version = tuple(int(part) for part in asked.stdout.split()[1].split(".")[:2])
            if version >= PIP_MIN:
                return [python, "-m", "pip"]
    if version:
        raise Stop("this Python's pip is too old: run  python3 -m pip install --upgrade pip")
    raise Stop(
        "this Python has no pip: install it (Debian and Ubuntu: apt install python3-pip; "
        "elsewhere: python3 -m ensurepip)"
    )


def run_checks() -> int:
    """Run every check, also after one failed, and sum up."""
    summary: list[str] = []
    failed = False
    for check in CHECKS:
        name, *arguments = check
        say(" ".join(check))
        started = time.monotonic()
        program, *words = name.split()
        code = call([str(BIN / program), *words, *arguments])
        failed = failed or code != 0
        verdict = "ok" if code == 0 else f"FAILED (exit code {code})"
        summary.append(f"  {name:<20}{time.monotonic() - started:7.1f} s  {verdict}")
    print("\n".join(["", *summary]), flush=True)
    return FAILED if failed else OK


def call(
    command: list[str], env: dict[str, str] | None = None, stderr: IO[bytes] | None = None
) -> int:
    """Run a program and wait for it, also when Ctrl-C makes it end."""
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    # The program gets Ctrl-C too, and ends in its own way.  A handler is not
    # inherited; ignoring the signal would be.
    before = signal.signal(signal.SIGINT, note)
    try:
        code = subprocess.call(command, env=env, stderr=stderr)
    except OSError as error:
        raise Stop(f"could not run {command[0]}: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise Stop("interrupted", INTERRUPTED)
    return code


def become(program: str, *arguments: str) -> int:
    """Turn into a program, so that signals and its exit code are its own."""
    path = str(BIN / program)
    if os.name == "nt":
        return call([path, *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(path, [path, *arguments])
    except OSError as error:
        raise Stop(
            f"could not run {path}: {error.strerror}; remove {VENV} and try again"
        ) from error


def say(text: str) -> None:
    """Progress goes to stderr: stdout belongs to the command."""
    print(f"run.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Stop as stop:
        say(str(stop))
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(INTERRUPTED)
