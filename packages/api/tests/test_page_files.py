"""The page's files: compressed where the browser takes it, small, and never stale."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

import outbox_api
from outbox_api.page import COMMENT_LINE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.api import Api

UI = Path(outbox_api.__file__).parent / "ui"
SENT_MAX = 90_000
"""Bytes of JavaScript and CSS."""
SCRIPTS = sorted(UI.rglob("*.js"))

pytestmark = pytest.mark.one_major


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


def url_of(api: Api, file: Path) -> str:
    return f"{api.url}/page/{file.relative_to(UI).as_posix()}"


async def test_scripts_and_styles_are_small(api: Api, browser: aiohttp.ClientSession) -> None:
    sent = 0
    for file in (*SCRIPTS, UI / "style.css"):
        async with browser.get(url_of(api, file), headers={"Accept-Encoding": "gzip"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            sent += len(await response.read())
    assert sent < SENT_MAX


@pytest.mark.parametrize("accepted", ["gzip", "br, gzip;q=0.5", "gzip;q=0", "identity", "x-gzip"])
async def test_a_file_is_sent_as_the_browser_takes_it(
    api: Api, browser: aiohttp.ClientSession, accepted: str
) -> None:
    is_compressed = accepted in ("gzip", "br, gzip;q=0.5")
    url = url_of(api, UI / "main.js")
    async with browser.get(url, headers={"Accept-Encoding": accepted}) as response:
        body = await response.read()
        assert ("Content-Encoding" in response.headers) == is_compressed
        assert response.headers["Vary"] == "Accept-Encoding"
    text = gzip.decompress(body) if is_compressed else body
    source = (UI / "main.js").read_bytes()
    assert len(text.splitlines()) == len(source.splitlines()), "lines keep their numbers"
    assert text == COMMENT_LINE.sub(b"", source)
    known = {"Accept-Encoding": accepted, "If-None-Match": response.headers["ETag"]}
    async with browser.get(url, headers=known) as again:
        assert again.status == 304
    other = {"Accept-Encoding": "gzip" if not is_compressed else "identity"}
    async with browser.get(url, headers={**known, **other}) as differs:
        assert differs.status == 200, "each version has its own tag"


def test_each_removed_line_is_a_comment() -> None:
    """No text of several lines has a line that begins with two slashes."""
    for file in SCRIPTS:
        source = file.read_text("utf-8")
        for found in re.finditer(COMMENT_LINE.pattern.decode(), source, re.MULTILINE):
            assert source[: found.start()].count("`") % 2 == 0, (file, found[0])
