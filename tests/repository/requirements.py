"""What the projects of the tree require, and what that brings with it."""

from __future__ import annotations

import importlib.metadata
import tomllib
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.checkout import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

PROJECTS: list[dict[str, Any]] = [
    tomllib.loads(file.read_text())["project"]
    for file in (ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"))
]
"""The product's first, then those of its leaves."""


def brought_by(requirements: Iterable[Requirement]) -> set[str]:
    """Return the canonical names of what is installed for some requirements, recursively."""
    names: set[str] = set()
    pending = list(requirements)
    while pending:
        requirement = pending.pop()
        if requirement.marker is not None and not holds(requirement):
            continue
        name = canonicalize_name(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in names:
            continue
        names.add(key)
        for text in importlib.metadata.requires(name) or ():
            more = Requirement(text)
            if holds(more, requirement.extras):
                more.marker = None
                pending.append(more)
    return {each.partition("[")[0] for each in names}


def holds(requirement: Requirement, extras: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
    """Return whether a requirement is one on this platform, with some extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras))
