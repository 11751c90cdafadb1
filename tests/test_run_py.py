"""run.py decides correctly which steps are necessary, and reports errors in one line."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: Path) -> ModuleType:
    """Load run.py for a project in a temporary directory."""
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    bin_dir = tmp_path / ".venv" / "bin"
    vars(module).update(
        ROOT=tmp_path,
        VENV=tmp_path / ".venv",
        BIN=bin_dir,
        PYTHON=bin_dir / "python",
        STAMP=tmp_path / ".venv" / "run-py-stamp",
    )
    return module


@pytest.fixture
def steps(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Run `set_up` with its two slow steps replaced, and return the executed steps."""
    taken: list[str] = []

    def make_environment(*, again: bool) -> None:
        taken.append("make again" if again else "make")
        run.BIN.mkdir(parents=True, exist_ok=True)
        run.PYTHON.unlink(missing_ok=True)
        run.PYTHON.symlink_to(sys.executable)

    def install(wanted: list[str]) -> None:
        taken.append("install")
        run.STAMP.write_text("\n".join(wanted) + "\n")

    monkeypatch.setattr(run, "make_environment", make_environment)
    monkeypatch.setattr(run, "install", install)

    def set_up() -> list[str]:
        taken.clear()
        run.set_up()
        return list(taken)

    return set_up


@pytest.mark.system
def test_the_environment_is_set_up_once(steps: Callable[[], list[str]]) -> None:
    assert steps() == ["make", "install"]
    assert steps() == []


@pytest.mark.system
def test_a_changed_project_is_reinstalled(run: ModuleType, steps: Callable[[], list[str]]) -> None:
    steps()
    (run.ROOT / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    assert steps() == ["install"]
    assert steps() == []


@pytest.mark.system
def test_changed_pins_are_reinstalled(run: ModuleType, steps: Callable[[], list[str]]) -> None:
    steps()
    run.pins().parent.mkdir()
    run.pins().write_text("a==1\n")
    assert steps() == ["install"]
    assert steps() == []


def test_unavailable_pins_are_reported_and_other_versions_installed(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str | None] = []

    def call(_: list[str], *, env: dict[str, str], **__: object) -> int:
        asked.append(env.get("PIP_CONSTRAINT"))
        return 1 if "PIP_CONSTRAINT" in env else 0

    run.VENV.mkdir()
    run.pins().parent.mkdir()
    run.pins().write_text("a==1\n")
    monkeypatch.setattr(run, "find_pip", lambda: ["pip"])
    monkeypatch.setattr(run, "call", call)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    run.install(run.stamp())
    # uv, which pip cannot get; pip itself; pip without pins.
    assert asked == [run.pins().as_uri(), run.pins().as_uri(), None]
    assert run.STAMP.read_text().splitlines() == [*run.stamp(), run.UNPINNED]
    assert "not all versions in .ci/constraints.txt are available here" in capfd.readouterr().err


@pytest.mark.parametrize("fails", [False, True], ids=["uv-installs", "uv-fails"])
def test_uv_installs_the_pinned_versions_and_pip_where_it_cannot(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    called: list[tuple[list[str], dict[str, str]]] = []

    def call(command: list[str], *, env: dict[str, str], **__: object) -> int:
        called.append((command, env))
        return int(fails and command[1:3] == ["-m", "uv"])

    run.VENV.mkdir()
    run.pins().parent.mkdir()
    run.pins().write_text("a==1\n")
    monkeypatch.setattr(run, "find_pip", lambda: ["pip"])
    monkeypatch.setattr(run, "uv_settings", lambda _: {"UV_DEFAULT_INDEX": "https://a.example"})
    monkeypatch.setattr(run, "call", call)
    run.install(run.stamp())
    (got, _), (uv, uv_env), *then_pip = called
    assert (got[0], got[-1]) == ("pip", "uv")
    assert uv[:5] == [str(run.PYTHON), "-m", "uv", "pip", "install"]
    for option in ("--constraints", "--build-constraints"):
        assert uv[uv.index(option) + 1] == str(run.pins())
    assert uv[uv.index("--python") + 1] == str(run.PYTHON)
    assert uv_env["UV_DEFAULT_INDEX"] == "https://a.example"
    packages = uv[uv.index("--editable") :]
    assert packages == ["--editable", str(run.ROOT)]
    assert [(each[0], each[-2:]) for each, _ in then_pip] == [("pip", packages)] * fails
    # The versions are the pinned ones, whichever of them installs.
    assert all(env["PIP_CONSTRAINT"] == run.pins().as_uri() for _, env in then_pip)
    assert run.STAMP.read_text().splitlines() == run.stamp()


def test_uv_takes_the_settings_of_pip(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = """\
:env:.cert='/env.pem'
:env:.find-links='/wheels  /more'
global.cert='/global.pem'
global.extra-index-url='\\nhttps://b.example/simple\\nhttps://c.example/simple'
global.index-url='https://a.example/simple'
global.progress-bar='off'
global.timeout='60'
install.index-url='https://i.example/simple?a=b'
install.trusted-host='a.example i.example'
list.no-index='true'
"""

    def run_command(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command == ["the", "pip", "config", "list"]
        return subprocess.CompletedProcess(command, 0, listed, "")

    monkeypatch.setattr(run.subprocess, "run", run_command)
    assert run.uv_settings(["the", "pip"]) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "1",
        "UV_NO_CONFIG": "1",
        "UV_DEFAULT_INDEX": "https://i.example/simple?a=b",
        "UV_INDEX": "https://b.example/simple https://c.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "a.example i.example",
        "SSL_CERT_FILE": "/env.pem",
        "UV_HTTP_TIMEOUT": "60",
    }


@pytest.mark.system
def test_an_incomplete_environment_is_rebuilt(
    run: ModuleType, steps: Callable[[], list[str]]
) -> None:
    steps()
    run.STAMP.write_text("unfinished\n")
    assert steps() == ["make again", "install"]


@pytest.mark.system
def test_an_environment_of_another_path_or_python_is_rebuilt(
    run: ModuleType, steps: Callable[[], list[str]]
) -> None:
    steps()
    run.STAMP.write_text(run.STAMP.read_text().replace("Python 3.", "Python 4."))
    assert steps() == ["make again", "install"]
    run.STAMP.write_text(run.STAMP.read_text().replace(str(run.ROOT), "/elsewhere"))
    assert steps() == ["make again", "install"]


@pytest.mark.system
def test_an_environment_without_its_python_is_rebuilt(
    run: ModuleType, steps: Callable[[], list[str]]
) -> None:
    steps()
    run.PYTHON.unlink()
    run.PYTHON.symlink_to("/nowhere/python")
    assert steps() == ["make again", "install"]


@pytest.mark.system
def test_a_manual_environment_is_used(run: ModuleType, steps: Callable[[], list[str]]) -> None:
    run.BIN.mkdir(parents=True)
    run.PYTHON.symlink_to(sys.executable)
    assert steps() == ["install"]
    assert steps() == []


def test_an_interrupted_install_is_repeated_by_the_next_run(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise run.Stop("interrupted", run.INTERRUPTED)

    run.VENV.mkdir()
    monkeypatch.setattr(run, "find_pip", lambda: ["pip"])
    monkeypatch.setattr(run, "call", interrupted)
    with pytest.raises(run.Stop, match="interrupted"):
        run.install(run.stamp())
    assert run.STAMP.read_text() == "unfinished\n"


@pytest.mark.system
def test_a_failing_pip_is_reported(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.VENV.mkdir()
    failing = "import sys; print('no such index', file=sys.stderr); sys.exit(5)"
    monkeypatch.setattr(run, "find_pip", lambda: [sys.executable, "-c", failing])
    with pytest.raises(run.Stop, match=r"pip could not install \(exit code 5\)") as stopped:
        run.install(run.stamp())
    assert stopped.value.exit_code == 3
    assert "no such index" in capfd.readouterr().err


def test_every_extra_is_installed(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def call(command: list[str], **_: object) -> int:
        called.append(command)
        return 0

    run.VENV.mkdir()
    pyproject = (ROOT / "pyproject.toml").read_text()
    (run.ROOT / "pyproject.toml").write_text(pyproject)
    leaf = run.ROOT / "packages" / "devtools"
    leaf.mkdir(parents=True)
    shutil.copy(ROOT / "packages/devtools/pyproject.toml", leaf)
    monkeypatch.setattr(run, "find_pip", lambda: ["pip"])
    monkeypatch.setattr(run, "call", call)
    run.install(run.stamp())
    extras = ",".join(tomllib.loads(pyproject)["project"]["optional-dependencies"])
    editable = ("--editable", f"{run.ROOT}[{extras}]", "--editable", str(leaf))
    assert called[0][-4:] == [*editable]
    assert run.STAMP.read_text().splitlines() == run.stamp()


def test_an_old_python_is_a_one_line_error(run: ModuleType) -> None:
    run.require_python((3, 11, 0))
    with pytest.raises(run.Stop, match=r"^Python 3\.11 or later is required; this is 3\.10\.4$"):
        run.require_python((3, 10, 4))


def test_a_python_without_pip_is_reported(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = {"missing": (1, ""), "old": (0, "pip 20.3.4 from /x (python 3.11)")}

    def run_command(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        code, output = responses[asked]
        return subprocess.CompletedProcess(command, code, output, "No module named pip")

    monkeypatch.setattr(run.subprocess, "run", run_command)
    asked = "missing"
    with pytest.raises(run.Stop, match=r"has no pip: install it \(Debian"):
        run.find_pip()
    asked = "old"
    with pytest.raises(run.Stop, match="pip is too old"):
        run.find_pip()


def test_all_checks_run_and_are_summarised(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    failing = ["ruff", "mypy"]

    def call(command: list[str], stdout: IO[bytes] | None = None, **_: object) -> int:
        if stdout is not None:
            stdout.write(f"says {command}\n".encode())
        return int(Path(command[0]).name in failing)

    monkeypatch.setattr(run, "call", call)
    monkeypatch.setattr(run.subprocess, "call", call)
    assert run.run_checks("") == 1
    output, _, summary = capfdbinary.readouterr().out.decode().partition("\n\n")
    # What runs beside the tests is printed after them.
    assert "/mypy']" in output
    lines = summary.splitlines()
    assert [line.split()[0] for line in lines] == [
        "ruff", "ruff", "pytest", "mypy", "lint-imports", "python", "pytest", "python",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines if "FAILED" in line] == ["ruff", "ruff", "mypy"]
    failing.clear()
    assert run.run_checks("") == 0


@pytest.mark.parametrize("tier", ["--full", "--soak"])
def test_a_tier_is_passed_to_pytest(run: ModuleType, tier: str) -> None:
    in_turn, beside = run.checks(tier)
    runs = [check for check in (*in_turn, *beside) if check[0].startswith("pytest")]
    assert [(check[-1], "--check-cases" in check) for check in runs] == [(tier, True)] * 2


@pytest.mark.system
def test_the_tier_unit_needs_the_fewest_packages(
    run: ModuleType, steps: Callable[[], list[str]]
) -> None:
    run.set_up(for_unit=True)
    assert run.STAMP.read_text().splitlines() == [*run.stamp(), run.UNIT_ONLY]
    # Everything else needs the rest, and the tier `unit` works with it.
    assert steps() == ["install"]
    run.set_up(for_unit=True)
    assert run.STAMP.read_text().splitlines() == run.stamp()


def test_the_tier_unit_installs_the_relay_and_its_own_extra(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    run.VENV.mkdir()
    with (run.ROOT / "pyproject.toml").open("a") as file:
        file.write("[project.optional-dependencies]\nrelay = []\nunit = []\ntest = []\n")
    monkeypatch.setattr(run, "find_pip", lambda: ["pip"])
    monkeypatch.setattr(run, "call", lambda command, **_: called.append(command) or 0)
    run.install([*run.stamp(), run.UNIT_ONLY])
    assert called[0][-1] == f"{run.ROOT}[relay,unit]"


@pytest.mark.system
def test_ctrl_c_lets_the_program_end_by_itself(run: ModuleType) -> None:
    program = (
        "import os, signal, sys\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "sys.exit(5 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 6)\n"
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(run.Stop, match="interrupted") as stopped:
        run.call([sys.executable, "-c", program])
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_a_benchmark_runs_in_the_project_directory_with_its_options(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    become: list[tuple[str, ...]] = []
    monkeypatch.chdir("/")
    monkeypatch.setattr(run, "set_up", lambda **_: None)
    monkeypatch.setattr(run, "exec_program", lambda *words: become.append(words) or 1)
    assert run.main(["bench", "--quick", "--only", "latency"]) == 1
    assert become == [("python", "-m", "benchmarks", "--quick", "--only", "latency")]
    assert Path.cwd() == run.ROOT


@pytest.mark.parametrize("command", ["audit", "release"])
def test_a_script_of_the_project_runs_in_the_environment_with_its_arguments(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    become: list[tuple[str, ...]] = []
    monkeypatch.setattr(run, "set_up", lambda **_: None)
    monkeypatch.setattr(run, "exec_program", lambda *words: become.append(words) or 3)
    assert run.main([command, "--version", "0.1.0"]) == 3
    script = run.ROOT / ".ci" / f"{command}.py"
    assert become == [("python", str(script), "--version", "0.1.0")]
    assert (ROOT / ".ci" / f"{command}.py").is_file()


def test_versions_are_pinned_with_the_pip_that_installs(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(run, "find_pip", lambda: ["the", "pip"])
    monkeypatch.setattr(run, "call", lambda command: called.append(command) or 0)
    assert run.main(["pin"]) == 0
    assert called == [[sys.executable, str(run.ROOT / ".ci" / "pin.py"), "the", "pip"]]


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "exit_code", "output"),
    [
        (["--help"], 0, "python3 run.py demo"),
        ([], 2, "python3 run.py demo"),
        (["nope"], 2, "unknown command 'nope'"),
    ],
)
def test_wrong_usage_prints_the_usage(arguments: list[str], exit_code: int, output: str) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "run.py", *arguments], capture_output=True, text=True
    )
    assert ended.returncode == exit_code
    assert output in (ended.stdout if exit_code == 0 else ended.stderr)
