"""Canary test: secrets must not appear in any output.

Each secret is a unique text. Real processes use them: they deliver, fail, execute every command and
route, and are shown in a browser. Afterwards all output is searched: logs, traces, metrics, pages,
process lists and tables.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from outbox.core.model.encryption_keys import format_key
from outbox.web.address import Address
from outbox.web.serving import listen, serving
from tests.support.broken_requests import broken_requests, send_each
from tests.support.browser import visiting
from tests.support.collector import collecting
from tests.support.ports import free_port
from tests.support.process import outbox, relay_process
from tests.support.relay import fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.asyncio(loop_scope="session"), pytest.mark.full]

PATHS = re.compile(r"\{(\w+)\}")


class Canaries:
    """The secrets, and the places where they were found."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.found: list[str] = []
        self.searched: dict[str, int] = {}

    def watch(self, name: str, text: str) -> str:
        """Watch for a secret, with and without its prefix."""
        self.texts[name] = text.strip()
        for prefix in ("whsec_", "obkey_"):
            if text.startswith(prefix):
                self.texts[f"{name}, bare"] = text.strip().removeprefix(prefix).rstrip("=")
        return text

    def search(self, where: str, what: str) -> None:
        self.searched[where] = self.searched.get(where, 0) + len(what)
        for name, text in self.texts.items():
            if text in what:
                at = what.index(text)
                self.found.append(f"{name} in {where}: …{what[max(at - 60, 0) : at + 20]}…")


async def test_no_secret_is_left_anywhere(database: Database, tmp_path: Path) -> None:
    canaries = Canaries()

    def file(name: str, text: str) -> str:
        (path := tmp_path / name).write_text(text)
        path.chmod(0o600)
        return str(path)

    key = canaries.watch("OUTBOX_KEY", format_key(os.urandom(32)))
    canaries.watch("database password", "canarydatabasepassword")
    canaries.watch("proxy password", "canaryproxypassword")
    canaries.watch(
        "proxy authorization", base64.b64encode(b"me:canaryproxypassword").decode().rstrip("=")
    )
    header = canaries.watch("header", "canaryheadervalue")
    dsn = database.dsn + ("&" if "?" in database.dsn else "?") + "password=canarydatabasepassword"
    env = {
        "OUTBOX_DSN_FILE": file("dsn", dsn),
        "OUTBOX_KEY_FILE": file("key", key),
        "OUTBOX_PROXY_FILE": file(
            "proxy", f"http://me:canaryproxypassword@127.0.0.1:{free_port()}"
        ),
        "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
    }

    async def command(*words: str, stdin: str = "", shows: str = "", **more: str) -> Any:
        """Run a command; `shows` names the field of its result that may show the secret."""
        ended = await outbox(*words, env=env | more, stdin=stdin)
        output = None
        if shows:
            output = ended.json[shows]
            canaries.search("output", ended.stdout.replace(output, "") + ended.stderr)
            return output
        canaries.search("output", ended.stdout + ended.stderr)
        return ended

    certificate = trustme.CA().issue_cert("relay.example.com")
    private = certificate.private_key_pem.bytes().decode()
    canaries.watch("client key", private.splitlines()[2])
    chain = "".join(blob.bytes().decode() for blob in certificate.cert_chain_pems)

    async def echo(request: web.Request) -> web.Response:
        """A receiver that echoes every request and fails."""
        output = "\n".join(f"{name}: {value}" for name, value in request.headers.items())
        bad = request.path == "/bad"
        return web.Response(
            status=400 if bad else 200, text=output, headers={"X-Request-Id": header}
        )

    application = web.Application()
    application.router.add_post("/{path}", echo)
    async with (
        collecting() as collector,
        serving(application, await listen(Address("127.0.0.1", 0))) as address,
    ):
        for name, url in (
            ("good", f"{address.url}good"),
            ("bad", f"{address.url}bad"),
            ("away", "https://receiver.example.com/hooks"),
            ("dead", f"http://127.0.0.1:{free_port()}/"),
        ):
            made = await command(
                *("endpoint", "add", name, url, "--headers-file", "-", "--lanes", "1", "--json"),
                stdin=f"Authorization: Bearer {header}\nX-Key: {header}\n",
                shows="secret",
            )
            canaries.watch(f"secret of {name}", made)
        await command("endpoint", "certificate", "away", "-", stdin=chain + private)
        rotated = await command("endpoint", "rotate-secret", "good", "--json", shows="secret")
        canaries.watch("rotated secret", rotated)
        token = await command(
            *("token", "add", "all", "--json"),
            *("--scope", "read", "--scope", "publish", "--scope", "operate"),
            shows="secret",
        )
        canaries.watch("token", token)
        fetch_token = canaries.watch(
            "fetch token",
            await command("endpoint", "fetch-token", "good", "--json", shows="token"),
        )
        admin, health, receivers, development = (free_port() for _ in range(4))
        served = {
            "OUTBOX_ADMIN": f"127.0.0.1:{admin}",
            "OUTBOX_HEALTH": f"127.0.0.1:{health}",
            "OUTBOX_RECEIVERS": f"127.0.0.1:{receivers}",
            "OUTBOX_LOG_LEVEL": "debug",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }
        log, development_log = tmp_path / "relay.log", tmp_path / "listen.log"
        async with (
            relay_process(env | served, log, is_forked=False) as relay,
            relay_process(
                env, development_log, None, "--port", str(development), name="listen"
            ) as receiver,
        ):
            await publish(database, 1, 2, type="order.paid")
            await until(
                lambda: fetchval(
                    database,
                    "SELECT (SELECT count(*) >= 2 FROM dead_letter) AND "
                    "(SELECT count(*) >= 2 FROM attempt WHERE outcome = 'delivered') AND "
                    "(SELECT count(*) = 2 FROM lane_progress WHERE last_response IS NOT NULL)",
                ),
                what="what works to be delivered, and what does not to have failed",
            )
            event = str(await fetchval(database, "SELECT event_id FROM outbox LIMIT 1"))
            for words in (
                ("endpoint", "list"),
                ("endpoint", "show", "good"),
                ("endpoint", "show", "away"),
                ("endpoint", "export"),
                ("endpoint", "test", "good"),
                ("endpoint", "test", "bad"),
                ("endpoint", "test", "away"),
                ("dead", "list"),
                ("dead", "show", "1"),
                ("trace", event),
                ("status",),
                ("doctor",),
                ("verify",),
                ("token", "list"),
                ("replay", "list"),
                ("rekey", "--check"),
            ):
                await command(*words)
                await command(*words, "--json")
            bad_header = f"Host: {header}"
            for words in (
                ("endpoint", "update", "good", "--headers-file", "-"),
                ("endpoint", "add", "x", "https://example.com", "--headers-file", "-"),
            ):
                for stdin in (bad_header, f"X-A: {header}\x01", header):
                    await command(*words, stdin=stdin, OUTBOX_DEBUG="1")
            await command("status", OUTBOX_KEY_FILE=file("bad", key + "x"), OUTBOX_DEBUG="1")
            away = "host=/nowhere dbname=x password=canarydatabasepassword"
            await command("status", OUTBOX_DSN_FILE=file("away", away), OUTBOX_DEBUG="1")

            async with aiohttp.ClientSession() as session:
                head = {"Authorization": f"Bearer {token}"}
                base = f"http://127.0.0.1:{admin}"
                async with session.get(f"{base}/openapi.json") as response:
                    paths = (await response.json())["paths"]
                values = {"name": "good", "id": event, "key": "k"}
                for path, methods in paths.items():
                    if "get" not in methods:
                        continue
                    for number in ("1", event):
                        filled = PATHS.sub(
                            lambda m, n=number: n if m[1] == "id" else values.get(m[1], "1"), path
                        )
                        async with session.get(base + filled, headers=head) as response:
                            canaries.search("API", str(response.headers) + await response.text())
                async with session.get(f"http://127.0.0.1:{health}/metrics") as response:
                    canaries.search("metrics", await response.text())
            async with visiting(f"{base}/") as visitor:
                await visitor.sign_in(token)
                for place in ("endpoints", "endpoint/bad", "dead", "letter/1", "replicas"):
                    await visitor.open(place)
                    await visitor.wait_for(visitor.main)
                    canaries.search("page", await visitor.page.content())
            payload = canaries.watch("payload of a malformed request", "canarypayload")
            for port in (admin, health, receivers, development):
                shown = fetch_token if port == receivers else token
                requests = broken_requests(shown, payload)
                assert len(await send_each("127.0.0.1", port, requests.values())) == len(requests)
            assert await receiver.end() == 0
            logged = await asyncio.to_thread(development_log.read_text)
            canaries.search("log", logged)
            assert "not HTTP" in logged
            assert relay.process is not None
            for what in ("cmdline", "environ"):
                process = Path(f"/proc/{relay.process.pid}/{what}")
                canaries.search("process list", await asyncio.to_thread(process.read_text))
            assert await relay.end() == 0
        logged = await asyncio.to_thread(log.read_text)
        canaries.search("log", logged)
        for port in (admin, health, receivers):
            assert f"requests at 127.0.0.1:{port}" in logged
        canaries.search("traces and metrics", collector.raw.decode("latin-1"))
    async with database.at_hand() as connection:
        tables = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') "
            "AND relnamespace = 'relay'::regnamespace AND NOT relispartition"
        )
        for table in tables:
            rows = await connection.fetch(f'SELECT t::text AS t FROM "{table["relname"]}" t')
            canaries.search(f"table {table['relname']}", "\n".join(row["t"] for row in rows))
    assert canaries.found == []
    for where in ("output", "API", "metrics", "page", "process list", "log", "traces and metrics"):
        assert canaries.searched[where] > 10, where
    echoed = await fetchval(database, "SELECT array_agg(last_response) FROM dead_letter")
    assert "authorization: (not kept)" in str(echoed).lower()
