"""What an index of packages shows of ours: links that lead to a file, pictures, and one status."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from outbox.cli.error_pages import DOCUMENTS_URL
from outbox.version import __version__
from tests.support.documents import ROOT, read

if TYPE_CHECKING:
    from pathlib import Path

REASON = "the packages of a release are not installed"
hatchling = pytest.importorskip("hatchling.metadata.core", reason=REASON)
plugins = pytest.importorskip("hatchling.plugin.manager", reason=REASON)
markdown = pytest.importorskip("markdown", reason=REASON)

FILES = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
PROJECTS: dict[str, dict[str, Any]] = {
    file.relative_to(ROOT).as_posix(): tomllib.loads(file.read_text("utf-8"))["project"]
    for file in FILES
}
URLS: dict[str, str] = PROJECTS["pyproject.toml"]["urls"]
REPOSITORY = URLS["Source"]
STATUS = "Development Status :: 4 - Beta"
FORMS = {
    "[a](docs/README.md#x)": "[a]({files}/docs/README.md#x)",
    "[a](#quickstart)": "[a]({files}/README.md#quickstart)",
    "[a](https://example.com/)": "[a](https://example.com/)",
    "![a](docs/a.png)": "![a]({pictures}/docs/a.png)",
    "[![a](docs/a.png)](docs/a.md)": "[![a]({pictures}/docs/a.png)]({files}/docs/a.md)",
    '<img src="docs/a.svg">': '<img src="{pictures}/docs/a.svg">',
    '<source srcset="docs/a.svg">': '<source srcset="{pictures}/docs/a.svg">',
    '<a href="docs/a.md">': '<a href="{files}/docs/a.md">',
}
"""What a README may contain, and what it is in a description."""
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Addresses(HTMLParser):
    """The addresses in a description, as an index renders it."""

    def __init__(self, description: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.feed(markdown.markdown(description, extensions=["fenced_code", "tables"]))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "href":
                self.links.append(value or "")
            elif name in ("src", "srcset"):
                self.pictures.append(value or "")


def description_of(project: Path) -> str:
    """The description in the metadata of the package that is built from a directory."""
    with contextlib.chdir(project):  # As builds do.
        metadata = hatchling.ProjectMetadata(str(project), plugins.PluginManager())
        return str(metadata.core.readme)


def file_of(address: str, kind: str) -> Path:
    """The file of this repository that an address of the repository names."""
    place = re.escape(f"{REPOSITORY}/{kind}/")
    found = re.fullmatch(rf"{place}(?:main|v{re.escape(__version__)})/([^#?]+)(#.*)?", address)
    assert found is not None, f"{address} is no file of {REPOSITORY}"
    return ROOT / found[1]


def check_addresses(description: str) -> None:
    """Check that each link and picture is absolute, and that ours are files of the repository."""
    found = Addresses(description)
    foreign = [each for each in found.links + found.pictures if not each.startswith("https://")]
    assert foreign == [], "an index has no repository around the description"
    for address in found.links:
        if address.startswith(f"{REPOSITORY}/"):
            assert file_of(address, "blob").is_file(), address
    for address in found.pictures:
        assert file_of(address, "raw").is_file(), address


@pytest.mark.parametrize("name", PROJECTS)
def test_the_links_of_a_packages_description_are_absolute_and_lead_to_a_file(name: str) -> None:
    project = (ROOT / name).parent
    description = description_of(project)
    check_addresses(description)
    assert REPOSITORY in description
    readme = (project / "README.md").read_text("utf-8")
    assert _FENCED.findall(description) == _FENCED.findall(readme), "examples are as they were"


def test_a_link_of_any_form_becomes_absolute(tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox/version.py").write_text(f'__version__ = "{__version__}"\n')
    (tmp_path / "pyproject.toml").write_bytes(FILES[0].read_bytes())
    (tmp_path / "README.md").write_text("\n".join(FORMS))
    files, pictures = (f"{REPOSITORY}/{kind}/v{__version__}" for kind in ("blob", "raw"))
    expected = [each.format(files=files, pictures=pictures) for each in FORMS.values()]
    assert description_of(tmp_path).splitlines() == expected


def test_all_packages_name_the_same_project() -> None:
    for name, project in PROJECTS.items():
        assert project["urls"] == URLS, name
    assert list(URLS) == ["Homepage", "Documentation", "Source", "Changelog", "Issues"]
    assert URLS["Documentation"] == DOCUMENTS_URL + "README.md"
    for name in ("Documentation", "Changelog"):
        assert file_of(URLS[name], "blob").is_file(), name
    package = json.loads(read("receivers/typescript/package.json"))
    assert package["repository"]["url"] == f"git+{REPOSITORY}.git"
    assert (ROOT / package["repository"]["directory"] / "package.json").is_file()
    assert package["bugs"] == URLS["Issues"]
    assert file_of(package["homepage"], "blob").is_file()


def test_the_packages_and_the_documents_agree_about_the_status() -> None:
    for name, project in PROJECTS.items():
        found = [each for each in project["classifiers"] if each.startswith("Development")]
        assert found == [STATUS], name
    assert "marked *Beta*" in read("docs/reference/compatibility.md")
