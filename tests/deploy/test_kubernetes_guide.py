"""The guide to Kubernetes: each command is followed, from an empty namespace to the page.

The rendered containers run as processes, with the roles that the guide creates and the migration's
Job grants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from standardwebhooks import Webhook

from outbox.errors import CannotRun
from tests.support.cluster import Cluster, objects_of, words_after
from tests.support.documents import ROOT, Session, examples
from tests.support.helm import KUBERNETES, Helm, validate_object
from tests.support.process import outbox
from tests.support.relay import all_ended
from tests.support.roles import dsn_of
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.documents import Block
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.one_major, pytest.mark.full]

GUIDE = "docs/howto/deploy-on-kubernetes.md"
CHART = "deploy/helm/outbox-relay"
ROLES = ("owner", "relay", "api", "operator")


def is_of_the_chart(block: Block) -> bool:
    """Whether a block has values that the reader may add."""
    return block.language == "yaml" and block.file is None


class Terminal:
    """The programs that the guide uses, for a cluster of processes."""

    def __init__(self, session: Session, cluster: Cluster, helm: Helm) -> None:
        self._directory, self._cluster, self._helm = session.directory, cluster, helm
        self._images: set[str] = set()
        self.printed: list[str] = []
        session.commands |= {"docker": self.docker, "helm": self.helm, "kubectl": self.kubectl}

    async def docker(self, words: list[str]) -> None:
        match words:
            case ["build", "-f", "deploy/Dockerfile", "-t", image, "."]:
                self._images.add(image)
            case ["push", image]:
                assert image in self._images
            case ["run", "--rm", image, *command, ">", file]:
                assert image in self._images
                (self._directory / file).write_text((await outbox(*command)).stdout)
            case _:
                raise AssertionError(words)

    async def helm(self, words: list[str]) -> None:
        action, *rest = words_after(words, "-n", "outbox")
        file, *rest = words_after(rest, "relay", CHART, "-f")
        values = yaml.safe_load((self._directory / file).read_text())
        (given,) = words_after(rest, "--set-file")
        key, _, file = given.partition("=")
        section, name = key.split(".")
        values[section] = {name: (self._directory / file).read_text()}
        assert f"{values['image']['repository']}:0.1.0" in self._images
        await self._cluster.release(action, self._helm, values, release="relay", namespace="outbox")

    async def kubectl(self, words: list[str]) -> str | None:
        match words_after(words, *(() if words[0] == "create" else ("-n", "outbox"))):
            case ["create", "namespace", "outbox"]:
                pass
            case ["create", "secret", "generic", name, *files]:
                paths = [self._directory / each.removeprefix("--from-file=") for each in files]
                self._cluster.secrets[name] = {each.name: each.read_text() for each in paths}
            case ["rollout", "status", deployment]:
                await are_ready(self._cluster, deployment.removeprefix("deployment/"))
            case ["exec", deployment, "--", "outbox", *command]:
                ended = await self._cluster.pods[deployment.removeprefix("deploy/")][0].run(
                    *command
                )
                assert ended.code == 0, ended.stderr
                self.printed.append(ended.stdout + ended.stderr)
                return self.printed[-1]
            case ["logs", job]:
                return self._cluster.jobs[job.removeprefix("job/")]
            case ["port-forward", service, "8080"]:
                (pod,) = self._cluster.pods[service.removeprefix("service/")]
                assert await _serves(pod.ports["admin"], "/", "<title>")
            case _:
                raise AssertionError(words)
        return None


async def are_ready(cluster: Cluster, deployment: str) -> None:
    """Wait until each pod of a Deployment is ready."""
    for pod in cluster.pods[deployment]:
        port = pod.ports["health"]
        await until(lambda port=port: _serves(port, "/readyz", "ready\n"), LIVE_S, deployment)


async def _serves(port: int, path: str, text: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://127.0.0.1:{port}{path}") as response,
        ):
            return text in await response.text()
    except aiohttp.ClientError:
        return False


class HttpReceiver:
    """The receiver of the guide's endpoint."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []

    async def serve(self, port: int) -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/hooks", self._receive)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    async def _receive(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.read()))
        return web.Response()


@pytest.fixture(scope="session")
def helm() -> Helm:
    try:
        return Helm(ROOT / CHART)
    except CannotRun as error:
        pytest.skip(str(error))


@pytest.fixture
async def session(empty_database: Database, tmp_path: Path) -> AsyncIterator[Session]:
    """A reader with the names of the guide made unique: roles belong to the server."""
    name = empty_database.name
    session = Session(empty_database, tmp_path)
    session.rewrites |= {
        rf"\boutbox_({'|'.join(ROLES)})\b": rf"outbox_\1_{name}",
        r"@db\.example/app\?sslmode=require": f"@{empty_database.dsn.partition('@')[2]}",
        r"DATABASE app\b": f"DATABASE {name}",
        r"\breceiver\.shop\.svc\b": "127.0.0.1",
        r"\b10\.0\.0\.0/8": "127.0.0.0/8",
    }
    yield session
    async with empty_database.connection() as administrator:
        for role in ROLES:
            of = f"outbox_{role}_{name}"
            await administrator.execute(f"DROP OWNED BY {of}; DROP ROLE {of}")


async def roles_of(database: Database) -> set[str]:
    """The roles of the sessions of relays and API."""
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT DISTINCT usename FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'outbox%'"
        )
    return {row["usename"].removesuffix(f"_{database.name}") for row in rows}


async def test_the_guide_delivers_an_event_with_a_role_for_each_process(
    session: Session, helm: Helm, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path / "pods", session.rewrites)
    terminal, receiver = Terminal(session, cluster, helm), HttpReceiver()

    async def before_line(line: str) -> None:
        if " trace " in line:
            await all_ended(session.database)
        elif " upgrade " in line:
            file = session.directory / "endpoints.yaml"
            file.write_text(file.read_text().replace("lanes: 4", "lanes: 8"))

    session.before_line = before_line
    runner = await receiver.serve(session.port)
    try:
        async with cluster.stack:
            await session.follow([b for b in examples(GUIDE) if not is_of_the_chart(b)])
            assert await roles_of(session.database) == {"outbox_relay", "outbox_api"}
            examined = await cluster.pods["relay"][0].run("doctor", "--json")
    finally:
        await runner.cleanup()
    ((headers, body),) = receiver.requests
    (secret,) = [
        line.split()[1]
        for printed in terminal.printed
        for line in printed.splitlines()
        if line.startswith("secret") and "whsec_" in line
    ]
    assert Webhook(secret).verify(body, headers)["data"] == {"order": 7}
    assert "whsec_" not in "".join(cluster.jobs.values())
    found = {
        each["check"]: each["message"]
        for each in examined.json["findings"]
        if each["severity"] != "ok" and each["check"] in ("roles", "secrets", "networks")
    }
    assert found == {}, "the roles are separate, and secrets are encrypted"


async def test_one_role_may_run_everything(session: Session, helm: Helm, tmp_path: Path) -> None:
    (shown,) = [b.text for b in examples(GUIDE) if is_of_the_chart(b) and "{key: dsn}" in b.text]
    database, owner = session.database, f"outbox_owner_{session.database.name}"
    async with database.connection() as administrator:
        for role in ROLES:
            await administrator.execute(f"CREATE ROLE outbox_{role}_{database.name} LOGIN")
        await administrator.execute(f"GRANT CREATE ON DATABASE {database.name} TO {owner}")
    cluster = Cluster(tmp_path / "pods", session.rewrites)
    key = (await outbox("rekey", "--generate")).stdout
    cluster.secrets["outbox"] = {"key": key, "dsn": dsn_of(database, owner)}
    async with cluster.stack:
        await cluster.release("install", helm, yaml.safe_load(shown))
        for deployment in ("shop", "shop-api"):
            await are_ready(cluster, deployment)
        assert await roles_of(database) == {"outbox_owner"}
        examined = await cluster.pods["shop"][0].run("doctor", "--json")
    (found,) = [each for each in examined.json["findings"] if each["check"] == "roles"]
    assert "which owns the schema" in found["message"]


def test_the_options_of_the_guide_are_values_of_the_chart(helm: Helm) -> None:
    given: list[dict[str, Any]] = [
        yaml.safe_load(block.text) for block in examples(GUIDE) if is_of_the_chart(block)
    ]
    for values in given:
        for each in objects_of(helm.render(values)):
            for version in KUBERNETES:
                validate_object(each, version)
    assert len(given) == 3
    assert [("WARNING" in helm.notes(values)) for values in given] == [False, False, True]
