"""The software bill of materials of a release, in CycloneDX's JSON.

It has the package, the dependencies of an application and of the extras that a relay or an
application adds, with the versions that the release was tested with, and their licences as
their metadata names them.  Everything else in the wheels is the project's own: the page's modules
are written by hand, and no library is bundled.  The receiver packages for TypeScript and Go have no
dependencies and are not in the wheels.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.spdx import fixup_id, is_expression
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cyclonedx.model.license import License

NAME = "outbox-relay"
LICENCE = "MIT"
RUNTIME_EXTRAS = (
    "adopt", "demo", "ed25519", "kafka", "nats", "otlp", "rabbitmq", "redis", "relay",
)  # fmt: skip
"""Extras of users; the others are tools of the project."""

OWN_FILES = {
    "page": "outbox_api/ui, in outbox-api: HTML, CSS and JavaScript modules of the relay's page",
    "schema": "outbox/schema: migrations in SQL",
}
"""What the wheels have beside Python modules; all of it is written for this project."""

CLASSIFIED = {
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""SPDX identifiers of classifiers that name one licence; "BSD License", for example, does not."""


@dataclass
class Package:
    """An installed package, and the names of those that it requires."""

    metadata: importlib.metadata.PackageMetadata
    requires: set[str] = field(default_factory=set)


def sbom_json(pyproject: str, version: str, epoch: int, wheel_sha256: str) -> str:
    """The bill as text; the same input gives the same text.

    Args:
        pyproject: the project's pyproject.toml.
        epoch: the time of the commit, in seconds since 1970.
    """
    project = tomllib.loads(pyproject)["project"]
    packages: dict[str, Package] = {}
    default = collect(project["dependencies"], packages)
    required = reachable(default, packages)
    optional = collect(
        [each for extra in RUNTIME_EXTRAS for each in project["optional-dependencies"][extra]],
        packages,
    )
    root = Component(
        name=NAME,
        version=version,
        type=ComponentType.APPLICATION,
        bom_ref=NAME,
        description=project["description"],
        purl=PackageURL("pypi", name=NAME, version=version),
        licenses=licences(LICENCE),
        hashes=[HashType.from_hashlib_alg("sha256", wheel_sha256)],
        components=[
            Component(name=name, description=text, bom_ref=f"{NAME}/{name}",
                      type=ComponentType.LIBRARY, licenses=licences(LICENCE))
            for name, text in OWN_FILES.items()
        ],
    )  # fmt: skip
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{NAME} {version} {epoch} {wheel_sha256}"),
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(epoch, UTC)),
    )
    components = {
        name: component_of(name, package, is_required=name in required)
        for name, package in packages.items()
    }
    for component in components.values():
        bom.components.add(component)
    bom.register_dependency(root, [components[name] for name in sorted(default | optional)])
    for name, package in packages.items():
        bom.register_dependency(
            components[name], [components[each] for each in sorted(package.requires)]
        )
    return (
        make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n"
    )


def collect(requirements: Iterable[str], packages: dict[str, Package]) -> set[str]:
    """Add installed packages that satisfy requirements, recursively; return the direct names."""
    direct = set()
    pending: list[tuple[Requirement, set[str]]] = [
        (Requirement(each), direct) for each in requirements
    ]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement, requires = pending.pop()
        if not applies(requirement, frozenset()):
            continue
        name = canonicalize_name(requirement.name)
        if name == NAME:
            continue
        requires.add(name)
        extras = frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        package = packages.setdefault(name, Package(importlib.metadata.metadata(name)))
        for text in importlib.metadata.requires(name) or ():
            further = Requirement(text)
            if applies(further, extras):
                further.marker = None
                pending.append((further, package.requires))
    return direct


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Whether this Python and platform need the requirement."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras))


def reachable(names: set[str], packages: dict[str, Package]) -> set[str]:
    """The names and all that they require."""
    found: set[str] = set()
    pending = [*names]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += packages[name].requires
    return found


def component_of(name: str, package: Package, *, is_required: bool) -> Component:
    version = package.metadata["Version"]
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}=={version}",
        description=package.metadata.get("Summary"),
        purl=PackageURL("pypi", name=name, version=version),
        scope=ComponentScope.REQUIRED if is_required else ComponentScope.OPTIONAL,
        licenses=[each for text in licence_names(package.metadata) for each in licences(text)],
    )


def licence_names(metadata: importlib.metadata.PackageMetadata) -> list[str]:
    """The licences that a package declares: SPDX where that is certain, otherwise its own words."""
    expression = metadata.get("License-Expression")
    if expression:
        return [expression]
    declared = (metadata.get("License") or "").strip()
    if declared and (fixup_id(declared) or is_expression(declared)):
        return [declared]
    classified = [
        each.rpartition(" :: ")[2]
        for each in metadata.get_all("Classifier") or ()
        if each.startswith("License :: ")
    ]
    if classified:
        return [CLASSIFIED.get(each, each) for each in classified]
    return [declared.partition("\n")[0]] if declared else []


def licences(text: str) -> list[License]:
    return [LicenseFactory().make_from_string(text)]
