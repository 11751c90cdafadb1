"""Hooks of MkDocs: the navigation, and links to files outside of the documents' folder.

The documents are read in the repository, too, so a link is the path of a file there.  What a
document links to becomes part of the site, under `repository/`; the repository's README, which is
the landing page there, becomes the site's.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
INDEX = DOCS + "README.md"
OUTSIDE = "repository/"

SEARCH_BOOST = {
    "README.md": 0.5,
    "reference/sql.md": 0.3,
    "reference/commands/": 0.5,
    OUTSIDE + "CHANGELOG.md": 0.2,
    OUTSIDE + "benchmarks/results/results.md": 0.2,
}
"""Weight in the search by the beginning of the path: these pages have every word, and guides have
the answer."""

_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")
_PICTURE = re.compile(r"!\[([^]]*)\]\(([^)\s#]+)\.png\)")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_HIGHLIGHTED = re.compile(
    r'<div class="(?:[^"]* )?highlight(?: [^"]*)?"[^>]*>\s*(<pre>.*?</pre>)', re.DOTALL
)
_TAG = re.compile(r"<[^>]*>")
_PROMPT = "$ "
_ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)]+)\)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the index: a section for each heading with a list of links."""
    config.nav = navigation((ROOT / INDEX).read_text("utf-8"))
    return config


def navigation(index: str) -> list[dict[str, object]]:
    """The sections of the index with their pages."""
    _, *parts = _SECTION.split(index)
    nav: list[dict[str, object]] = [{"Home": "README.md"}]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        pages = [{name: in_site(source_of(link, INDEX))} for name, link in _ENTRY.findall(text)]
        if pages:
            nav.append({title: pages})
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of the documents' folder that documents link to."""
    pending = [DOCS + each.src_uri for each in files.documentation_pages()]
    while pending:
        document = pending.pop()
        for target in links((ROOT / document).read_text("utf-8"), document):
            uri = in_site(target)
            if not uri.startswith(OUTSIDE) or files.get_file_from_path(uri):
                continue
            if not (ROOT / target).is_file():
                raise PluginError(f"{document}: a link leads to {target}, which is not a file")
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links as MkDocs reads them: relative to the page in the site."""
    uri = page.file.src_uri
    for beginning, boost in SEARCH_BOOST.items():
        if uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    source = uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else DOCS + uri

    def in_both_schemes(match: re.Match[str]) -> str:
        """A picture `x.png` beside `x-dark.png` follows the scheme that is chosen on the page."""
        text, name = match.groups()
        if not (ROOT / source_of(f"{name}-dark.png", source)).is_file():
            return match[0]
        return f"![{text}]({name}.png#only-light)\n![{text}]({name}-dark.png#only-dark)"

    def replaced(match: re.Match[str]) -> str:
        target = in_site(source_of(match[1], source))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    parts = _FENCED.split(markdown)
    fences = [*_FENCED.findall(markdown), ""]
    return "".join(
        _LINK.sub(replaced, _PICTURE.sub(in_both_schemes, part)) + fence
        for part, fence in zip(parts, fences, strict=True)
    )


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the copy button copy the commands of a session, without prompts and output."""

    def with_commands(match: re.Match[str]) -> str:
        lines = html.unescape(_TAG.sub("", match[1])).splitlines()
        copied = []
        continues = False
        for line in lines:
            if continues or line.startswith(_PROMPT):
                copied.append(line.removeprefix(_PROMPT))
                continues = line.endswith("\\")
        text = html.escape("\n".join(copied))
        return match[0].replace(">", f' data-copy="{text}">', 1) if copied else match[0]

    return _HIGHLIGHTED.sub(with_commands, content)


def links(text: str, document: str) -> list[str]:
    """The files that a document links to, as paths in the repository."""
    return [source_of(each[1], document) for each in _LINK.finditer(_FENCED.sub("", text))]


def source_of(link: str, document: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def in_site(source: str) -> str:
    """The path of a file of the repository in the site's sources."""
    if source == "README.md":
        return "README.md"
    if source.startswith(DOCS):
        return source.removeprefix(DOCS)
    return OUTSIDE + source
