"""The documentation site: it builds without a warning, its links lead somewhere, its pages request
nothing from third parties, and its search works without a server."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag

import pytest

from docs.tools.pictures import ASSETS, PICTURES
from tests.support.chromium import browsing, chromium
from tests.support.documents import ROOT, read

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Page

    from tests.support.postgres import Database

QUESTIONS = {
    "dead letter replay": "howto/replay-dead-letters.html",
    "pgbouncer transaction": "howto/run-behind-pgbouncer.html",
    "rotate a signing key": "howto/rotate-a-secret.html",
    "django": "howto/publish-from-django.html",
    "idempotency key": "howto/publish-once-or-later.html",
    "memory relay": "howto/size-an-installation.html",
    "OUTBOX_LEASE_S": "reference/settings.html",
    "rds supabase": "howto/use-managed-postgresql.html",
    "cockroachdb": "howto/use-managed-postgresql.html",
    "webhooks customers": "howto/webhooks-for-customers.html",
    "object store": "howto/large-payloads.html",
    "change payload": "howto/versions-of-a-type.html",
    "X-Sequence": "reference/requests.html",
    "exhausted": "reference/errors.html",
    "GDPR": "howto/erase-a-persons-data.html",
    "throughput": "howto/size-an-installation.html",
    "monitoring": "howto/monitor-and-alert.html",
    "alerts": "howto/monitor-and-alert.html",
    "runbook": "howto/runbook.html",
    "disk full": "howto/runbook-events.html",
    "OutboxNoLeader": "howto/runbook-relay.html",
    "roll back": "howto/upgrade.html",
    "receiver down": "concepts/faq.html",
    "change the url of an endpoint": "howto/manage-endpoints.html",
    "verify signature": "reference/requests.html",
    "dlq": "concepts/retries.html",
    "uninstall": "concepts/faq.html",
    "deliver twice": "concepts/faq.html",
    "license": "concepts/faq.html",
}
"""What a reader searches for, and the page with the answer."""

RESULTS_SHOWN = 5
"""The page must be among that many results, which a screen shows without scrolling."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    if find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    target = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
        | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return target


class Links(HTMLParser):
    """Addresses that a page requests, addresses that it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.requested: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if "src" in found:
            self.requested.append(found["src"])
        if tag == "link" and found.get("rel") != "canonical":
            self.requested.append(found["href"])
        if tag == "a" and "href" in found:
            self.linked.append(found["href"])


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Links]:
    """The parsed pages."""
    return {path: Links(path.read_text("utf-8")) for path in site.rglob("*.html")}


@pytest.mark.full
def test_every_link_of_the_site_leads_somewhere(site: Path, pages: dict[Path, Links]) -> None:
    broken = []
    for path, links in pages.items():
        for link in links.linked + links.requested:
            address, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|/", address):
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                target in pages and unquote(anchor) not in pages[target].anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 50
    assert broken == []


@pytest.mark.full
def test_a_picture_of_the_page_follows_the_scheme(site: Path) -> None:
    text = (site / "howto/use-the-page.html").read_text("utf-8")
    shown = ["overview.png#only-light", "overview-dark.png#only-dark"]
    assert re.findall(r'<img [^>]*src="([^"]*)"', text) == shown


@pytest.mark.full
def test_the_navigation_has_the_pages_of_the_index_by_name(site: Path) -> None:
    """A page of the name README.md is not taken for the page of its section."""
    text = (site / "tutorial/first-event.html").read_text("utf-8")
    navigation = text[text.index('class="md-nav md-nav--primary"') :]
    links = re.findall(r'<a href="([^"]*)" class="md-nav__link', navigation)
    assert "../repository/receivers/typescript/index.html" in links
    assert re.search(r"Receivers in TypeScript\s", navigation)


@pytest.mark.full
async def test_copied_commands_have_neither_prompts_nor_output(site: Path) -> None:
    if chromium() is None:
        pytest.skip("chromium is not installed")
    async with browsing() as browser:
        page = await browser.new_page()
        await page.goto((site / "tutorial/first-event.html").as_uri())
        # As the theme does when the button is clicked.
        copied = await page.eval_on_selector_all(
            "pre code",
            "all => all.map(each => {"
            " const commands = each.closest('[data-copy]');"
            " return commands ? commands.dataset.copy : each.innerText.trimEnd(); })",
        )
    install = ".venv/bin/pip install 'outbox-relay[relay]'"
    assert f"createdb shop\npython3 -m venv .venv\n{install}" in copied
    (migrate,) = (each for each in copied if each.startswith("outbox migrate"))
    assert migrate.split("\n") == [
        "outbox migrate",
        'outbox endpoint add shop http://127.0.0.1:9000/hooks --type "order.*"'
        " --allow-network 127.0.0.1",
    ]


@pytest.mark.full
def test_no_page_requests_anything_from_third_parties(site: Path, pages: dict[Path, Links]) -> None:
    foreign = []
    for links in pages.values():
        foreign += [each for each in links.requested if re.match(r"(https?:)?//", each)]
    for path in site.rglob("*.css"):
        foreign += re.findall(r"url\([\"']?((?:https?:)?//[^)]+)", path.read_text("utf-8"))
    assert foreign == []


@pytest.mark.full
async def test_the_search_finds_the_page_without_a_server(site: Path) -> None:
    if chromium() is None:
        pytest.skip("chromium is not installed")
    foreign: list[str] = []
    found: dict[str, list[str]] = {}
    async with browsing() as browser:
        page = await browser.new_page()
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file:", "data:", "about:", "blob:"))
                else foreign.append(request.url)
            ),
        )
        await page.goto((site / "index.html").as_uri())
        for question in QUESTIONS:
            found[question] = await results_of(page, question)
    missed = {
        question: found[question]
        for question, expected in QUESTIONS.items()
        if not any(each.endswith(expected) for each in found[question][:RESULTS_SHOWN])
    }
    assert missed == {}
    assert foreign == []


async def results_of(page: Page, question: str) -> list[str]:
    """The pages that the search shows, best first."""
    await page.reload()
    await page.focus("input.md-search__input")
    await page.keyboard.type(question)
    link = ".md-search-result__item > a.md-search-result__link"
    await page.wait_for_selector(link)
    hrefs = await page.eval_on_selector_all(link, "all => all.map(each => each.href)")
    return [re.sub(r"[?#].*", "", each) for each in hrefs]


@pytest.mark.one_major
async def test_the_reference_has_the_columns_of_the_migrated_tables(database: Database) -> None:
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT c.relname AS name, a.attname AS column FROM pg_class c"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            " WHERE c.relnamespace = 'relay'::regnamespace AND c.relkind IN ('r', 'p', 'v')"
            " AND NOT c.relispartition AND c.relname <> 'migration'"
        )
    documented = set()
    for part in read("docs/reference/sql.md").split("\n### ")[1:]:
        name = part.partition("\n")[0]
        documented |= {(name, each) for each in re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)}
    assert documented == {(row["name"], row["column"]) for row in rows}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_generated_one(name: str) -> None:
    made = PICTURES[name]().svg()
    assert (ASSETS / name).read_text("utf-8") == made, "run: python -m docs.tools.pictures"
