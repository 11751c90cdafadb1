"""The image of deploy/Dockerfile, built and run without Docker.

Built by buildah on a root file system of Debian's packages, which takes minutes, and only as
root.  A container is a process in a read-only chroot with its own mounts, without capabilities.
"""

from __future__ import annotations

import asyncio
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.small_disk import may_mount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
_RELEASE, _PYTHON = "bookworm", "3.11"
"""The release of Debian that the image is based on here, and its Python."""
_OF_OLDER_PYTHON = ("async-timeout",)
"""What libraries need with that Python, 3.11.2, and not with this one."""
_MACHINE = "x86_64"
_BUILD_MAX_S = 1200
_END_MAX_S = 30

# Runs in a mount namespace of its own.  $1: the root; $2: a file of host names;
# $3: user:group; $4: bind mounts as "source target mode" lines; then the command.
_RUN = """
set -e
root=$1 hosts=$2 user=${3%%:*} group=${3##*:} mounts=$4
shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$hosts" "$root/etc/hosts"
printf '%s' "$mounts" | while read -r source target mode; do
    if [ -d "$source" ]; then mkdir -p "$root$target"; else touch "$root$target"; fi
    mount --bind -o "$mode" "$source" "$root$target"
done
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid "$user" --regid "$group" --clear-groups \
    --bounding-set=-all --no-new-privs "$@"
"""


def can_build() -> bool:
    """Whether this process can build and run the image."""
    programs = ("buildah", "mmdebstrap", "unshare", "setpriv")
    return (
        sys.platform == "linux"
        and platform.machine() == _MACHINE
        and may_mount()
        and all(shutil.which(each) is not None for each in programs)
    )


class Volume(NamedTuple):
    """A file or directory of this machine in a container."""

    source: Path
    target: str
    mode: str
    """`ro` or `rw`."""


@dataclass(frozen=True)
class Image:
    """An unpacked image."""

    root: Path
    config: Mapping[str, Any]
    """Its configuration: Env, Entrypoint, Cmd, User, Healthcheck."""

    def command(self, words: Sequence[str] | None = None) -> list[str]:
        """The command line of a container; without words, the image's own."""
        return [*self.config["Entrypoint"], *(self.config["Cmd"] if words is None else words)]

    @property
    def healthcheck(self) -> list[str]:
        """The command of the health check."""
        kind, *command = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return list(command)


@dataclass
class Containers:
    """Containers of one image, which end with the block."""

    image: Image
    hosts: Path
    """Like /etc/hosts, in every container."""
    _running: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        volumes: Sequence[Volume] = (),
        directory: str = "/",
    ) -> asyncio.subprocess.Process:
        """Start a container; its output is a pipe."""
        variables = dict(each.split("=", 1) for each in self.image.config["Env"]) | dict(env)
        argv = [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", _RUN, "container"),
            str(self.image.root),
            str(self.hosts),
            self.image.config["User"],
            "".join(f"{each.source} {each.target} {each.mode}\n" for each in volumes),
            *(
                "env",
                "-i",
                f"--chdir={directory}",
                *(f"{name}={value}" for name, value in variables.items()),
            ),
            *command,
        ]
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._running.append(process)
        return process

    async def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        volumes: Sequence[Volume] = (),
        directory: str = "/",
    ) -> tuple[int | None, str]:
        """Run a container to its end; return its exit code and output."""
        process = await self.start(command, env, volumes, directory)
        async with asyncio.timeout(_END_MAX_S):
            out, _ = await process.communicate()
        return process.returncode, out.decode()

    async def stop(self, process: asyncio.subprocess.Process) -> tuple[int | None, str]:
        """Stop a container as Docker does; return its exit code and remaining output."""
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_END_MAX_S):
            out, _ = await process.communicate()
        return process.returncode, out.decode()

    async def end(self) -> None:
        """Kill what still runs."""
        for process in self._running:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@asynccontextmanager
async def containers(image: Image, names: Sequence[str]) -> AsyncIterator[Containers]:
    """Run containers that find each other on this machine under these names."""
    with _hosts_file(names) as hosts:
        running = Containers(image, hosts)
        try:
            yield running
        finally:
            await running.end()


@contextmanager
def _hosts_file(names: Sequence[str]) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write(f"127.0.0.1 localhost {' '.join(names)}\n")
        file.flush()
        path = Path(file.name)
        path.chmod(0o644)
        yield path


@contextmanager
def built_image() -> Iterator[Image]:
    """Build the image of deploy/Dockerfile, and unpack it for the block."""
    with tempfile.TemporaryDirectory(prefix="outbox-image-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # The container's user goes through it.
        _build(directory)
        try:
            buildah = _Buildah(directory)
            container = buildah("from", "outbox-relay")
            root = Path(buildah("mount", container))
            image = json.loads(buildah("inspect", "--type", "image", "outbox-relay"))
            yield Image(root, image["Docker"]["config"])
        finally:
            subprocess.run([*buildah.command, "umount", "--all"], check=False, capture_output=True)


class _Buildah:
    """buildah with its storage in one directory."""

    def __init__(self, directory: Path) -> None:
        self.command = ["buildah", "--root", f"{directory}/root", "--runroot", f"{directory}/run"]
        self.command += ["--storage-driver", "vfs"]

    def __call__(self, *words: str) -> str:
        return _run(*self.command, *words).strip()


def _build(directory: Path) -> None:
    buildah, wheels, base = _Buildah(directory), directory / "wheels", directory / "base.tar"
    packages = "--include=python3,python3-pip,ca-certificates"
    _run("mmdebstrap", "--variant=minbase", packages, _RELEASE, str(base))
    empty = buildah("from", "scratch")
    buildah("add", "--quiet", empty, str(base), "/")
    buildah("commit", "--quiet", empty, "localhost/base")
    base.unlink()
    # The packages come from this machine's pip, whose index the build cannot reach everywhere.
    platforms = [f"--platform={each}_{_MACHINE}" for each in ("manylinux2014", "manylinux_2_28")]
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", f"--dest={wheels}"),
        *(f"--python-version={_PYTHON}", "--only-binary=:all:", *platforms),
        *(f"--constraint={ROOT}/.ci/constraints.txt", *_requirements()),
    )
    pip_conf = directory / "pip.conf"
    pip_conf.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    buildah(
        *("bud", "--quiet", "--isolation=chroot", "--format=docker"),
        *(f"--volume={wheels}:/wheels:ro", f"--volume={pip_conf}:/etc/pip.conf:ro"),
        *("--build-arg=BASE=localhost/base", f"--file={DOCKERFILE}"),
        *("--tag=outbox-relay", str(ROOT)),
    )


def _requirements() -> list[str]:
    """What the build takes from the index: what builds, and what package and leaves require."""
    import tomllib

    files = (ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"))
    read = [tomllib.loads(file.read_text()) for file in files]
    package, *leaves = (each["project"] for each in read)
    (chosen,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    extras: dict[str, list[str]] = dict(package["optional-dependencies"])
    for leaf in leaves:
        extras |= {
            f"{leaf['name']}[{name}]": required
            for name, required in leaf.get("optional-dependencies", {}).items()
        }
    named = [*read[0]["build-system"]["requires"], *package["dependencies"]]
    named += [each for leaf in leaves for each in leaf["dependencies"]]
    for extra in ("relay", *chosen.split(",")):
        named += extras[extra]
    # Our own packages, with extras of theirs: outbox-brokers[all]==0.1.0.
    own = {each.partition("==")[0] for each in named if each.startswith("outbox-")}
    named += [each for name in own & set(extras) for each in extras[name]]
    return [*_OF_OLDER_PYTHON, *(each for each in named if not each.startswith("outbox-"))]


def _run(*argv: str) -> str:
    """Run a program; its output.

    Raises:
        AssertionError: It failed; the message has its last lines.
    """
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_BUILD_MAX_S, check=False)
    assert result.returncode == 0, f"{argv}: {result.stderr[-2000:]}"
    return result.stdout
