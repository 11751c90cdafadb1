"""Builds a release, checks it, and describes it.

    python3 run.py release                  the version of HEAD's tag, such as v0.1.0
    python3 run.py release --version 0.1.0  a rehearsal: the tag does not exist yet

`outbox/version.py` is the only source of the version, so that a source distribution, a shallow
clone and a checkout without tags have it as well; a release checks the tag against it.  The
packages are built from an export of HEAD, twice, in different directories; both builds must have
the same bytes.  The results are in `dist/outbox-relay-VERSION`: source distribution and wheel of
outbox-relay and of each leaf in `packages/`, a software bill of materials (CycloneDX) and
SHA256SUMS.  Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
VERSION_FILE = "outbox/version.py"
CHANGELOG = "CHANGELOG.md"
CHECKSUMS = "SHA256SUMS"

OK, CANNOT_RUN = 0, 3
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?")
_SECTION = re.compile(r"^## \[([^]]+)\](?: - (\S+))?$", re.MULTILINE)


class Refused(Exception):
    """The tree cannot be released; the message says what to do."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 run.py release", description="Build a release.")
    parser.add_argument("--version", metavar="X.Y.Z", help="rehearse a version without its tag")
    asked = parser.parse_args(arguments).version
    try:
        commit = require_clean_checkout()
        version = require_version(asked, commit)
        require_changelog_section((ROOT / CHANGELOG).read_text("utf-8"), version)
        directory = build_release(version, commit)
    except Refused as refused:
        print(f"release: {refused}", file=sys.stderr)
        return CANNOT_RUN
    print((directory / CHECKSUMS).read_text("utf-8"), end="")
    say(f"outbox-relay {version} of commit {commit[:12]} is in {directory.relative_to(ROOT)}")
    return OK


# ------------------------------------------------------------------ refusals


def require_clean_checkout() -> str:
    """The commit of HEAD.

    Raises:
        Refused: this is no git checkout, or it differs from HEAD.
    """
    try:
        top = git("rev-parse", "--show-toplevel")
        commit = git("rev-parse", "--verify", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        top = commit = ""
    if not commit or Path(top).resolve() != ROOT:
        raise Refused("this is no git checkout: a release is built from a commit of one")
    changed = git("status", "--porcelain").splitlines()
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise Refused(
            f"the tree is dirty ({changed[0].strip()}{more}): commit or remove the changes"
        )
    return commit


def require_version(asked: str | None, commit: str) -> str:
    """The version of the tree, which is that of the tag, or the one that was asked for.

    Raises:
        Refused: they differ, or there is no tag.
    """
    ours = version_of((ROOT / VERSION_FILE).read_text("utf-8"))
    tags = [t for t in git("tag", "--points-at", "HEAD").splitlines() if re.match(r"v\d", t)]
    if asked is None and not tags:
        raise Refused(
            f"HEAD has no tag: run  git tag -a v{ours}  or rehearse with --version {ours}"
        )
    wanted = {asked} if asked else {each.removeprefix("v") for each in tags}
    if wanted != {ours}:
        source = f"--version {asked}" if asked else f"the tag {' '.join(tags)}"
        raise Refused(
            f"{source} does not match {ours!r} of {VERSION_FILE}: set the version there, in the "
            "requirements of each pyproject.toml and in deploy/helm/outbox-relay/Chart.yaml, "
            "commit, and tag that commit"
        )
    if not _VERSION.fullmatch(ours):
        raise Refused(f"{ours!r} of {VERSION_FILE} is no version such as 0.1.0 or 0.2.0rc1")
    tagged = git("for-each-ref", "--format=%(objectname) %(*objectname)", f"refs/tags/v{ours}")
    if tagged and commit not in tagged.split():
        raise Refused(
            f"the tag v{ours} is at another commit: releases are not repeated, use a new version"
        )
    return ours


def version_of(source: str) -> str:
    """The value of `__version__` in a module's source."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))
            ):
                return version
    raise Refused(f"{VERSION_FILE} has no __version__")


def require_changelog_section(text: str, version: str) -> None:
    """Check that the changelog has a dated section for the version, and no later entries.

    Raises:
        Refused: a section is missing, empty, undated, or "Unreleased" has entries.
    """
    headings = [*_SECTION.finditer(text)]
    ends = [each.start() for each in headings[1:]] + [len(text)]
    sections = {
        each[1]: (each[2], text[each.end() : end].strip())
        for each, end in zip(headings, ends, strict=True)
    }
    day, entries = sections.get(version, (None, ""))
    if not entries or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", day or ""):
        raise Refused(
            f"{CHANGELOG} has no section for the version: write one below "
            f"## [{version}] - YYYY-MM-DD"
        )
    if sections.get("Unreleased", (None, ""))[1]:
        raise Refused(f"{CHANGELOG} has entries under Unreleased: move them to [{version}]")


# --------------------------------------------------------------------- build


def build_release(version: str, commit: str) -> Path:
    """Build twice, compare, check, describe; return the directory with the results.

    Raises:
        Refused: a step failed, or the builds differ.
    """
    from sbom import sbom_json

    epoch = git("show", "--no-patch", "--format=%ct", commit)
    with tempfile.TemporaryDirectory() as temporary:
        first, second = (Path(temporary) / name for name in ("first", "second"))
        for directory in (first, second):
            say(f"building in {directory}")
            build_packages(directory, epoch)
        packages = require_same_bytes(first / "dist", second / "dist")
        run_tool("twine", "check", "--strict", *map(str, packages))
        (wheel,) = (first / "dist").glob("outbox_relay-*.whl")
        bill = first / "dist" / f"{wheel.name.partition('-py3')[0]}.cdx.json"
        pyproject = (first / "tree" / "pyproject.toml").read_text("utf-8")
        bill.write_text(sbom_json(pyproject, version, int(epoch), sha256(wheel)), "utf-8")
        files = sorted([*packages, bill])
        sums = "".join(f"{sha256(each)}  {each.name}\n" for each in files)
        (first / "dist" / CHECKSUMS).write_text(sums, "utf-8")
        target = DIST / f"outbox-relay-{version}"
        if target.exists():
            shutil.rmtree(target)
        DIST.mkdir(exist_ok=True)
        shutil.move(first / "dist", target)
    return target


def build_packages(directory: Path, epoch: str) -> None:
    """Build the source distributions, and a wheel from each, of an export of HEAD."""
    tree = directory / "tree"
    # The index is HEAD, because the checkout is clean. Files that git ignores stay outside.
    git("checkout-index", "--all", f"--prefix={tree}/")
    for project in (tree, *(file.parent for file in tree.glob("packages/*/pyproject.toml"))):
        run_tool(
            "build", "--no-isolation", "--outdir", str(directory / "dist"), str(project),
            env={"SOURCE_DATE_EPOCH": epoch},
        )  # fmt: skip


def require_same_bytes(first: Path, second: Path) -> list[Path]:
    """The packages of the first build.

    Raises:
        Refused: those of the second one are others.
    """
    packages = sorted(first.iterdir())
    for each in packages:
        other = second / each.name
        if not other.exists() or other.read_bytes() != each.read_bytes():
            raise Refused(f"two builds of {each.name} differ: the build is not reproducible")
    return packages


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_tool(module: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a tool of the environment; show its output if it fails.

    Raises:
        Refused: it failed.
    """
    done = subprocess.run(
        # -P: the directory build/ of the checkout is no module.
        [sys.executable, "-P", "-m", module, *arguments],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise Refused(f"{module} failed with exit code {done.returncode}; its output is above")


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],  # noqa: S607 (the git of the checkout)
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout.strip()


def say(text: str) -> None:
    """Print progress on stderr; stdout has the checksums."""
    print(f"release: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
