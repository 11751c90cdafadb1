#!/usr/bin/env python3
"""Install everything once, and run a task.

    python3 run.py demo [ARGS...]      deliver events from an embedded PostgreSQL, check the order
    python3 run.py test unit           tests that need no server, process or browser: 30 seconds
    python3 run.py test                all checks: lint, types, import contracts, tests
    python3 run.py test --full         the same on every installed PostgreSQL, with slow tests
    python3 run.py test --soak         the same on PostgreSQL 14 to 18, with long random runs
    python3 run.py test ARGS...        pytest with these arguments
    python3 run.py sim [ARGS...]       whole relays under faults, on virtual time
    python3 run.py bench [ARGS...]     throughput, latency and memory beside peers
    python3 run.py outbox ARGS...      any outbox command, such as: outbox --help
    python3 run.py docs                build the documentation site in build/site
    python3 run.py docs --serve        the same, and serve it on 127.0.0.1:8000
    python3 run.py fuzz [ARGS...]      coverage-guided fuzzing of all parsers
    python3 run.py audit               known vulnerabilities of the installed versions
    python3 run.py pin                 renew the pinned versions
    python3 run.py release             build and check the packages of the tag at HEAD

Requires Python 3.11 or later with pip. The first run creates .venv beside this
file and installs the versions of .ci/constraints.txt, with uv where pip can get
it; later runs start at once.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

PYTHON_MIN = (3, 11)
PIP_MIN = (22, 3)  # The first version with the option --python.

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# Line 1 identifies the Python and the path of the environment, line 2 is a hash of the
# requirements; the other lines say what else is true of the environment.
STAMP = VENV / "run-py-stamp"
UNPINNED = "other versions than pinned"
UNIT_ONLY = "for the tier unit only"
UV_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "no-index": "UV_OFFLINE",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip, and the variables by which uv takes them."""

COMMANDS = ["demo", "test", "sim", "bench", "outbox", "docs", "fuzz", "audit", "pin", "release"]
UNIT = "unit"
FOR_UNIT = ("relay", UNIT)
"""Extras that the tier `unit` needs."""
TIERS = ("", UNIT, "--full", "--soak")
"""The default tier has no name."""
SIM_SEEDS = {"": "4", "--full": "200", "--soak": "2000"}
"""Simulated hours of each tier."""
REPOSITORY = "tests/repository"
"""Checks of the tree itself: they parse each file once, in one process."""

Check = tuple[str, ...]


def checks(tier: str) -> tuple[list[Check], list[Check]]:
    """The commands of a tier: one after the other, and those beside them."""
    lint: list[Check] = [("ruff check", "."), ("ruff format", "--check", "--quiet", ".")]
    if tier == UNIT:
        return [*lint, ("pytest", "--unit", *in_processes(2), "--quiet")], []
    options = ["--check-cases", *([tier] if tier else [])]
    return (
        # Six processes on two cores, because tests wait for I/O.
        [*lint, ("pytest", *in_processes(6), "--ignore", REPOSITORY, *options)],
        [
            ("mypy",),
            ("lint-imports",),
            ("python .ci/audit.py",),
            (f"pytest {REPOSITORY}", "--quiet", *options),
            # Last, so that a failing seed, which was drawn, stands beside the summary.
            ("python -m tests.sim", "--seeds", SIM_SEEDS[tier]),
        ],
    )


def in_processes(count: int) -> tuple[str, ...]:
    """Options of pytest: this many processes, of one collection where a fork is safe."""
    if sys.platform == "linux":
        return "--forks", str(count)
    return "-n", str(count), "--maxschedchunk", "1"


OK, FAILED, USAGE, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 3, 130


class Stop(Exception):
    """Ends the run with a message and an exit code."""

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
    if command not in COMMANDS:
        raise Stop(f"unknown command {command!r}; see: python3 run.py --help", USAGE)
    require_python(sys.version_info[:3])
    # The programs compile what is installed: without this, each would compile it again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if command == "pin":
        return call([sys.executable, str(ROOT / ".ci" / "pin.py"), *find_pip()])
    tier = "".join(rest[:1])
    is_tier = command == "test" and len(rest) <= 1 and tier in TIERS
    set_up(for_unit=is_tier and tier == UNIT)
    if is_tier:
        os.chdir(ROOT)
        return run_checks(tier)
    if command == "test":
        os.chdir(ROOT)
        return exec_program("pytest", *rest)
    if command in ("sim", "bench", "fuzz"):
        os.chdir(ROOT)
        module = {"sim": "tests.sim", "bench": "benchmarks", "fuzz": "tests.fuzz"}[command]
        return exec_program("python", "-m", module, *rest)
    if command == "docs":
        if rest not in ([], ["--serve"]):
            raise Stop("docs takes no argument, or --serve", USAGE)
        os.chdir(ROOT)
        # The theme warns about a later MkDocs in every build.
        os.environ["NO_MKDOCS_2_WARNING"] = "1"
        serve = ("serve", "--dev-addr", "127.0.0.1:8000")
        return exec_program("mkdocs", *(serve if rest else ("build", "--strict", "--clean")))
    if command in ("audit", "release"):
        return exec_program("python", str(ROOT / ".ci" / f"{command}.py"), *rest)
    return exec_program("outbox", *(["demo", *rest] if command == "demo" else rest))


def require_python(version: tuple[int, ...]) -> None:
    if version < PYTHON_MIN:
        need, have = (".".join(map(str, each)) for each in (PYTHON_MIN, version))
        raise Stop(f"Python {need} or later is required; this is {have}")


def set_up(*, for_unit: bool = False) -> None:
    """Create the environment and install the dependencies, unless that is done.

    Args:
        for_unit: the tier `unit` needs the fewest packages.
    """
    wanted = stamp()
    found = STAMP.read_text().splitlines() if STAMP.exists() else []
    works = python_works()
    if works and found[:2] == wanted and (for_unit or UNIT_ONLY not in found):
        return
    # An environment without a stamp was made by hand and is kept. One with a stamp that was
    # not finished, or is for another Python or another path, is replaced.
    if not works or (found and found[0] != wanted[0]):
        make_environment(again=VENV.exists())
    install([*wanted, UNIT_ONLY] if for_unit else wanted)


def stamp() -> list[str]:
    version = ".".join(map(str, sys.version_info[:3]))
    project = b"".join(file.read_bytes() for file in project_files())
    pinned = pins().read_bytes() if pins().exists() else b""
    return [f"Python {version} in {ROOT}", hashlib.sha256(project + pinned).hexdigest()]


def project_files() -> list[Path]:
    """The files `pyproject.toml`: the package's, and those of its leaves."""
    return [ROOT / "pyproject.toml", *sorted((ROOT / "packages").glob("*/pyproject.toml"))]


def pins() -> Path:
    """The file with the exact versions."""
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
        f"creating {VENV}"
        + (" again: it was unfinished, broken or for another Python" if again else "")
    )
    try:
        if VENV.is_symlink() or VENV.is_file():
            VENV.unlink()
        elif again:
            shutil.rmtree(VENV)
        # Without pip: Debian's Python has no ensurepip. The running Python's pip installs into it.
        venv.create(VENV, with_pip=False, symlinks=os.name != "nt")
    except (OSError, subprocess.CalledProcessError) as error:
        raise Stop(f"could not create {VENV}: {error}") from error


def install(wanted: list[str]) -> None:
    import tomllib

    pip = find_pip()
    # In one command, because pip would look for the leaves in the index. The first package's extras
    # bring theirs: with other extras, pip takes the same leaf for another one.
    first, *leaves = project_files()
    extras = tomllib.loads(first.read_text("utf-8"))["project"].get("optional-dependencies", {})
    chosen = [each for each in extras if each in FOR_UNIT or UNIT_ONLY not in wanted]
    suffix = f"[{','.join(chosen)}]" if chosen else ""
    packages = ["--editable", f"{first.parent}{suffix}"]
    for file in leaves:
        packages += ["--editable", str(file.parent)]
    say("installing the packages of pyproject.toml (about a minute the first time)")
    STAMP.write_text("unfinished\n")
    started = time.monotonic()
    stamped = list(wanted)
    code, messages = 0, ""
    if not pins().exists() or not run_uv(pip, packages):
        code, messages = run_pip(pip, packages, pinned=pins().exists())
    if code and pins().exists():
        # The index may lack them, or they do not support this Python or machine.
        say("not all versions in .ci/constraints.txt are available here; installing others")
        stamped.append(UNPINNED)
        code, messages = run_pip(pip, packages, pinned=False)
    if code:
        sys.stderr.write(messages)
        raise Stop(
            f"pip could not install (exit code {code}); its message is above. "
            "It needs the package index: check the network and pip's configuration"
        )
    STAMP.write_text("\n".join(stamped) + "\n")
    say(f"installed in {time.monotonic() - started:.0f} s")


def run_uv(pip: list[str], packages: list[str]) -> bool:
    """Install the pinned versions with uv; return whether pip could get it and it could.

    It takes a sixth of pip's processor time: it works on several packages at once, and leaves each
    module to be compiled by the first process that imports it.
    """
    if run_pip(pip, ["--retries=1", "--only-binary=uv", "uv"], pinned=True)[0]:
        return False
    command = [
        str(PYTHON), "-m", "uv", "pip", "install", "--quiet", "--python", str(PYTHON),
        "--constraints", str(pins()), "--build-constraints", str(pins()), *packages,
    ]  # fmt: skip
    # Its messages are not needed: pip is run if it fails, and has its own.
    return call(command, env={**os.environ, **uv_settings(pip)}, stderr=subprocess.DEVNULL) == 0


def uv_settings(pip: list[str]) -> dict[str, str]:
    """Variables of uv that say what pip's configuration says: uv does not read it."""
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    found = {
        name.removeprefix(prefix): " ".join(ast.literal_eval(value).split())
        for prefix in ("global.", "install.", ":env:.")  # The last one counts.
        for name, _, value in (line.partition("=") for line in listed.splitlines())
        if name.startswith(prefix)
    }
    if "find-links" in found:
        found["find-links"] = found["find-links"].replace(" ", ",")
    settings = {UV_SETTINGS[name]: value for name, value in found.items() if name in UV_SETTINGS}
    # pip, too, takes a version from any of its indexes.  uv's own files must not redirect it.
    fixed = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1", "UV_NO_CONFIG": "1"}
    return {**fixed, **settings}


def run_pip(pip: list[str], packages: list[str], *, pinned: bool) -> tuple[int, str]:
    """Install with pip; return its exit code and its messages.

    The messages are shown after a failure only, because Ctrl-C makes pip print much.
    """
    # The user's pip settings must not redirect the installation.
    env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    if pinned:
        # Variables, because they apply to build dependencies as well; later versions of pip have
        # a second variable for those. A URI, because a space would end a path.
        env |= dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), pins().as_uri())
    command = [*pip, "--python", str(PYTHON), "--disable-pip-version-check", "install", "--quiet"]
    with tempfile.TemporaryFile() as messages:
        code = call([*command, *packages], env=env, stderr=messages)
        messages.seek(0)
        return code, messages.read().decode(errors="replace")


def find_pip() -> list[str]:
    """The command line of a pip that can install into another environment."""
    version: tuple[int, ...] = ()
    for python in (sys.executable, getattr(sys, "_base_executable", sys.executable)):
        result = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
        if result.returncode == 0:  # "pip 23.0.1 from ..."
            version = tuple(int(part) for part in result.stdout.split()[1].split(".")[:2])
            if version >= PIP_MIN:
                return [python, "-m", "pip"]
    if version:
        raise Stop("this Python's pip is too old: run  python3 -m pip install --upgrade pip")
    raise Stop(
        "this Python has no pip: install it (Debian and Ubuntu: apt install python3-pip; "
        "elsewhere: python3 -m ensurepip)"
    )


def run_checks(tier: str) -> int:
    """Run all checks of a tier, also after a failure, and print a summary."""
    in_turn, beside = checks(tier)
    results_beside: list[tuple[str, int]] = []
    with tempfile.TemporaryFile() as output:

        def run_beside() -> None:
            results_beside.extend(run_check(check, output) for check in beside)

        thread = threading.Thread(target=run_beside)
        thread.start()
        results = [run_check(check) for check in in_turn]
        thread.join()
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
    results += results_beside
    print("\n".join(["", *(line for line, _ in results)]), flush=True)
    return FAILED if any(code for _, code in results) else OK


def run_check(check: Check, output: IO[bytes] | None = None) -> tuple[str, int]:
    """Run a check; return its line of the summary and its exit code.

    Args:
        check: a program of the environment, and its arguments.
        output: where its output goes, if other checks run at the same time.
    """
    name, *arguments = check
    program, *words = name.split()
    command = [str(BIN / program), *words, *arguments]
    started = time.monotonic()
    if output is None:
        say(" ".join(check))
        code = call(command)
    else:
        output.write(f"run.py: {' '.join(check)}\n".encode())
        output.flush()
        code = subprocess.call(command, stdout=output, stderr=output)
    outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
    return f"  {name:<24}{time.monotonic() - started:7.1f} s  {outcome}", code


def call(
    command: list[str], env: dict[str, str] | None = None, stderr: IO[bytes] | int | None = None
) -> int:
    """Run a program and wait for its end, also after Ctrl-C."""
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    # The program receives Ctrl-C as well and handles it. A handler is not inherited by the
    # program; an ignored signal would be.
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


def exec_program(program: str, *arguments: str) -> int:
    """Replace this process, so that signals and the exit code are the program's."""
    path = str(BIN / program)
    if os.name == "nt":
        return call([path, *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(path, [path, *arguments])
    except OSError as error:
        raise Stop(
            f"could not run {path}: {error.strerror}; remove {VENV} and run again"
        ) from error


def say(text: str) -> None:
    """Print progress on stderr; stdout is for the command's output."""
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
