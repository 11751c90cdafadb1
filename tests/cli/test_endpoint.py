"""`outbox endpoint` and its subcommands."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shlex
import signal
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from aiohttp import web

from outbox.core.delivery.retry_preview import markdown
from outbox.core.messages.signature import parse_secret, verify
from outbox.core.model.retry_policy import PRESETS
from outbox.operations.endpoints import states as endpoint_states
from outbox.store.cluster.replicas import ReplicaStore
from tests.cli.test_commands import execute
from tests.destinations import hostile
from tests.destinations.authority import Authority
from tests.support import process
from tests.support.checkout import ROOT
from tests.support.commands import Result
from tests.support.ports import free_port
from tests.support.relay import (
    OK,
    Network,
    Sent,
    add_endpoint,
    exceptions,
    fetchval,
    publish,
    register,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from outbox.core.model.response import AttemptResult
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/hooks"
OTHER = "https://example.com/other"

GUIDE = (ROOT / "docs/reference/retry-policies.md").read_text()


# ----------------------------------------------------------------- policies


def test_policies_prints_what_the_guide_shows(outbox: Command) -> None:
    (block,) = re.findall(r"^```console\n\$ (.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    line, _, output = block.partition("\n")
    assert outbox(*shlex.split(line)[1:]).out == output


def test_policies_without_a_name_print_all_presets(outbox: Command) -> None:
    shown = outbox("endpoint", "policies", "--json").json
    assert [each["policy"] for each in shown] == list(PRESETS)
    stepped = shown[3]
    assert stepped["retry"]["base_s"] == 300
    assert len(stepped["schedule"]) == 6
    assert stepped["schedule"][1]["delay"] == {"min_s": 255, "mean_s": 300, "max_s": 345}
    assert outbox("endpoint", "policies", "--markdown").out == markdown()
    text = outbox("endpoint", "policies").out
    assert text.count("\nATTEMPT") == len(PRESETS)


def test_an_unknown_policy_is_a_usage_error(outbox: Command) -> None:
    result = outbox("endpoint", "policies", "stepped,attempts=0")
    assert (result.code, result.error) == (
        2,
        "retry.attempts: must be between 1 and 10000, not 0",
    )


# ------------------------------------------------------------- add and update


def test_every_setting_has_a_flag(here: Command) -> None:
    made = here(
        "endpoint", "add", "a", URL,
        "--type", "order.*", "--type", "refund.**", "--filter", "@.total > 100",
        "--tenant", "acme", "--lanes", 2, "--method", "PUT",
        "--header-prefix", "X-Acme-", "--format", "cloudevents", "--source", "/shop",
        "--compat", "github", "--compat-secret-file", "-", "--compat-until", "2199-01-31",
        "--header", "Authorization: Bearer hunter2",
        "--header", "X-Env:prod",
        "--connect-timeout", "2s", "--timeout", "1m", "--retry", "stepped,attempts=8",
        "--in-flight-max", 2, "--rate", 0.5, "--batch-max", 50, "--allow-network", "10.1.2.3",
        "--no-keep-alive",
        "--retryable", "429", "--retryable", "5xx", "--on-dead-letter", "block",
        "--on-missing", "hold", "--no-probes", "--keep-responses", "none",
        "--backlog-max", 1000, "--backlog-age", "2d", "--disable-after", "12h",
        "--contact", "ops@acme.example",
        "--json", stdin=b"hub-4711\n",
    )  # fmt: skip
    assert list(made.json) == [
        *("id", "name", "url", "secret", "lanes", "types", "waiting", "events_before"),
        "warnings",
    ]
    shown = here("endpoint", "show", "a", "--json")
    assert "hunter2" not in shown.out
    assert "hub-4711" not in made.out + shown.out
    assert shown.json["settings"] == {
        "name": "a",
        "url": URL,
        "types": ["order.*", "refund.**"],
        "tenant": "acme",
        "all_tenants": False,
        "filter": "@.total > 100",
        "method": "PUT",
        "headers": {"Authorization": None, "X-Env": None},
        "header_prefix": "X-Acme-",
        "compat": {"preset": "github", "until": "2199-01-31T00:00:00Z"},
        "format": "cloudevents",
        "source": "/shop",
        "connect_timeout": "2s",
        "timeout": "1m",
        "in_flight_max": 2,
        "rate": 0.5,
        "batch_max": 50,
        "keep_alive": False,
        "allow_networks": ["10.1.2.3/32"],
        "ca": None,
        "keep_responses": "none",
        "retry": "base=5m,factor=2,cap=6h,jitter=proportional,ratio=0.15,attempts=8,age=24h",
        "retryable": ["429", "5xx"],
        "on_dead_letter": "block",
        "on_missing": "hold",
        "on_forgotten": "hold",
        "probes": False,
        "backlog_max": 1000,
        "backlog_age": "2d",
        "disable_after": "12h",
        "contact": "ops@acme.example",
        "lanes": 2,
    }
    text = here("endpoint", "show", "a").out
    assert "hunter2" not in text
    for line in (
        "filter           @.total > 100",
        "headers          Authorization X-Env (values not shown)",
        "backlog_max      1000",
        "backlog_age      2d",
        "batch_max        50",
        "keep_alive       no",
        "ca               the system's",
    ):
        assert line in text.splitlines()


def test_show_prints_how_long_keep_alive_is_suspended(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    assert "keep_alive       yes" in here("endpoint", "show", "a").out.splitlines()
    execute(database, "UPDATE endpoint_health SET unsolicited_at = '2026-01-01T10:00Z'")
    assert "not reused" not in here("endpoint", "show", "a").out
    execute(database, "UPDATE endpoint_health SET unsolicited_at = clock_timestamp()")
    assert "connections      not reused until 2" in here("endpoint", "show", "a").out
    assert here("endpoint", "show", "a", "--json").json["health"]["unsolicited_at"] is not None
    here("endpoint", "update", "a", "--no-keep-alive")
    shown = here("endpoint", "show", "a").out
    assert "keep_alive       no" in shown.splitlines()
    assert "not reused" not in shown
    here("endpoint", "update", "a", "--keep-alive")
    assert "not reused until" in here("endpoint", "show", "a").out


def test_show_prints_the_ownership_history(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    assert "relay            none" in here("endpoint", "show", "a").out.splitlines()

    async def move() -> None:
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            store = ReplicaStore(connection)
            (endpoint_id,) = (await store.read_ownership(0)).unowned
            first = await register(store, name="one:1")
            other = await register(store, name="other:2")
            await store.claim(first, [endpoint_id], f"replica {first}")
            assert await store.expire_replica(first, f"replica {other}", 1.0)
            await store.claim(other, [endpoint_id], f"replica {other}")

    asyncio.run(move())
    text = here("endpoint", "show", "a").out
    assert "relay            other:2 (replica 2) since " in text
    history = here("endpoint", "show", "a", "--json").json["ownership_history"]
    assert [(h["claimed"], h["relay"], h["epoch"], h["actor"], h["reason"]) for h in history] == [
        (True, "other:2", 3, "replica 2", None),
        (False, "one:1", 2, "replica 2", "lease expired"),
        (True, "one:1", 1, "replica 1", None),
    ]
    reported = [line.split() for line in text.splitlines() if "lease expired" in line]
    assert [words[2:5] for words in reported] == [["one:1", "freed", "2"]]


def test_update_prints_the_changed_settings(here: Command) -> None:
    here("endpoint", "add", "a", URL, "--tenant", "t", "--filter", "@.a == 1")
    done = here(
        "endpoint", "update", "a", "--name", "b", "--lanes", 8, "--reset", "filter", "--url", OTHER
    )
    assert done.out == (
        'updated endpoint "a"\n'
        "  name: a -> b\n"
        f"  url: {URL} -> {OTHER}\n"
        "  filter: @.a == 1 -> none\n"
        "  lanes: 4 -> 8\n"
        "nothing is pending; events from now on go through the new lanes\n"
    )
    again = here("endpoint", "update", "b", "--lanes", 8)
    assert (again.code, again.out) == (
        0,
        'endpoint "b" already has these settings; nothing was changed\n',
    )
    as_json = here("endpoint", "update", "b", "--all-tenants", "--json").json
    assert as_json["name"] == "b"
    assert as_json["changed"] == {"tenant": ["t", "none"], "all_tenants": ["no", "yes"]}
    # A tenant takes the place of all, and --reset removes it.
    here("endpoint", "update", "b", "--tenant", "u")
    row = here("endpoint", "show", "b", "--json").json["endpoint"]
    assert (row["tenant"], row["all_tenants"], row["generation"]) == ("u", False, 2)
    here("endpoint", "update", "b", "--reset", "tenant")
    assert here("endpoint", "show", "b", "--json").json["endpoint"]["tenant"] is None


def test_headers_that_some_servers_refuse_cause_a_warning(here: Command, tmp_path: Path) -> None:
    def header(size: int) -> str:
        """With colon and line end, of this size on the wire."""
        return "X-A: " + "a" * (size - 7)

    added = here("endpoint", "add", "a", URL, "--header", header(7168), "--json")
    says = "headers: the headers have 7168 bytes: Jetty, lighttpd and Tomcat refuse requests with"
    assert says in added.err
    assert added.json["warnings"][0].startswith(says)
    assert "headers" not in here("endpoint", "update", "a", "--lanes", 2).err
    assert "7169 bytes" in here("endpoint", "update", "a", "--header", header(7169)).err
    assert "headers" not in here("endpoint", "add", "b", URL, "--header", header(7167)).err
    file = tmp_path / "endpoints.json"
    value = header(7170).partition(": ")[2]
    declared = [{"name": "b", "url": URL, "headers": {"X-A": value}}]
    file.write_text(orjson.dumps({"endpoints": declared}).decode())
    warned = f"endpoints[0].{says}".replace("7168", "7170")
    assert warned in here("apply", "-f", file).err
    assert "headers" not in here("apply", "-f", file).err


def test_update_merges_headers_and_replaces_lists(here: Command, database: Database) -> None:
    here(
        "endpoint", "add", "a", URL, "--header", "X-A: 1", "--header", "X-B: 2",
        "--retryable", "429", "--backlog-max", 5,
    )  # fmt: skip

    def settings() -> dict[str, Any]:
        return dict(here("endpoint", "show", "a", "--json").json["settings"])

    def stored() -> Any:
        return orjson.loads(execute(database, "SELECT headers::text FROM endpoint"))

    here("endpoint", "update", "a", "--header", "x-a: 3", "--retryable", "5xx")
    assert settings()["headers"] == {"X-B": None, "x-a": None}
    assert stored() == {"X-B": "2", "x-a": "3"}
    assert settings()["retryable"] == ["5xx"]
    here("endpoint", "update", "a", "--reset", "headers", "--header", "X-C: 4",
         "--reset", "retryable")  # fmt: skip
    assert stored() == {"X-C": "4"}
    assert settings()["retryable"] is None
    here("endpoint", "update", "a", "--retryable", "none", "--reset", "backlog-max",
         "--backlog-age", "1d")  # fmt: skip
    assert settings()["retryable"] == []
    assert "retryable        none" in here("endpoint", "show", "a").out.splitlines()
    assert (settings()["backlog_max"], settings()["backlog_age"]) == (None, "24h")


WRONG = [
    (["--header", "X-A"], '--header: has no ":"'),
    (["--header", "X-Lane: 1"], "headers: 'X-Lane' is set by the relay"),
    (["--retry", "slow"], 'there is no policy "slow"'),
    (["--retry", "base=1h,cap=1m"], "retry.cap: must be between 1h"),
    (["--retryable", "200"], "retryable: '200' contains a 2xx"),
    (["--method", "GET"], "method: must be one of POST, PUT, PATCH, not 'GET'"),
    (["--on-dead-letter", "stop"], "on_dead_letter: must be one of continue, block"),
    (["--timeout", "2h"], "timeout: must be longer than 0 s and at most 1h"),
    (["--timeout", "0"], "timeout: must be longer than 0 s"),
    (["--backlog-max", "0"], "backlog_max: must be between 1"),
    (["--filter", "@.**"], "filter: "),
    (["--filter", "@.a ="], 'syntax error at or near "="; a valid one is: @.total > 100'),
    (["--filter", "@.a >"], "filter: invalid SQL/JSON path: syntax error at its end; a valid"),
    (
        ["--filter", "@.a == 1", "--reset", "filter"],
        "--reset filter and --filter exclude each other",
    ),
    (["--reset", "policy"], '--reset: there is no setting "policy"; there are types, filter, '),
    (["--reset", "keep-alife"], 'did you mean "keep_alive"?'),
    (["--name", " "], "name: must be printable text"),
    (["--url", "http://10.0.0.1/"], "url: 10.0.0.1 is a private network"),
]


def test_an_invalid_update_changes_nothing(here: Command) -> None:
    here("endpoint", "add", "a", URL)
    for args, says in WRONG:
        result = here("endpoint", "update", "a", *args)
        assert result.code == 2
        assert says in result.error
    (only,) = here("endpoint", "export", "--json").json["endpoints"]
    assert only.keys() == {"id", "name", "url"}


def test_help_groups_the_options(outbox: Command) -> None:
    groups = ["Subscription", "Requests", "Failures", "Options"]
    for command, more in (("add", ["Destinations"]), ("update", [])):
        text = outbox("endpoint", command, "--help").out
        titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
        assert titles == groups + more
    assert "HTTP receiver" in outbox("endpoint", "add", "--help").out


# ------------------------------------------------------------------- states


def test_several_endpoints_are_paused_and_resumed(here: Command) -> None:
    for name in ("a", "b"):
        here("endpoint", "add", name, URL)
    assert here("endpoint", "pause", "a", "--comment", "they moved").code == 0
    both = here("endpoint", "pause", "a", "b")
    assert both.out == 'endpoint "a" is already paused\npaused endpoint "b"\n'
    state = here("endpoint", "show", "a").out.splitlines()[3]
    assert re.fullmatch(r"state +paused since \S+ \S+ by \S+@\S+: they moved", state)
    as_json = here("endpoint", "resume", "a", "--json").json
    assert [(c["name"], c["state"], c["changed"]) for c in as_json] == [("a", "active", True)]
    assert here("endpoint", "resume", "a", "b").out == (
        'endpoint "a" was not paused; it is retried at once\nresumed endpoint "b"\n'
    )
    assert here("endpoint", "pause").code == 2
    enabled = here("endpoint", "enable", "a")
    assert (enabled.code, enabled.error) == (
        2,
        'endpoint "a" is active; only a disabled endpoint can be enabled',
    )


def test_enable_prints_the_replay_of_what_was_missed(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    disabled = "UPDATE endpoint SET state = 'disabled', state_at = '2026-01-31 12:00Z' RETURNING 1"
    execute(database, disabled)
    execute(database, "UPDATE subscription SET to_batch = 1 RETURNING 1")
    event = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}') RETURNING id"
    batch = "INSERT INTO batch (batch, high) SELECT 1, id FROM event RETURNING 1"
    execute(database, f"WITH event AS ({event}) {batch}")
    _, reason, replay = here("endpoint", "enable", "a").out.splitlines()
    assert reason.startswith("it has missed 1 event while it was disabled; to send")
    program, *words = shlex.split(replay)
    assert (program, words[:5]) == (
        "outbox",
        ["replay", "--endpoint", "a", "--since", "2026-01-31T12:00:00+00:00"],
    )
    assert here(*words, "--dry-run").code == 0


def test_enable_says_that_nothing_was_missed(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    execute(database, "UPDATE endpoint SET state = 'disabled' RETURNING 1")
    execute(database, "UPDATE subscription SET to_batch = 1 RETURNING 1")
    assert here("endpoint", "enable", "a").out.splitlines()[1:] == [
        "it has missed no event while it was disabled"
    ]


def test_rotate_secret_shows_the_new_one_once(here: Command) -> None:
    first = here("endpoint", "add", "a", URL, "--json").json["secret"]
    reported = here("endpoint", "rotate-secret", "a")
    assert "not shown again" in reported.err
    assert re.search(r"^old secret  signs until \d{4}-", reported.out, re.MULTILINE)
    made = here("endpoint", "rotate-secret", "a", "--overlap", "0", "--json").json
    assert (made["live"], made["old_until"]) == (1, None)
    assert made["secret"] not in (first, reported.out)
    shown = here("endpoint", "show", "a")
    assert "whsec_" not in shown.out
    wrong = here("endpoint", "rotate-secret", "a", "--overlap", "soon")
    assert (wrong.code, wrong.error) == (
        2,
        '--overlap: "soon" is not a time such as 0.5s, 30s, 10m, 2h or 1d',
    )


# ------------------------------------------------------------------ removal


@asynccontextmanager
async def removing(database: Database) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `outbox endpoint remove a --wait`, which ends with the removal."""
    removal = await asyncio.create_subprocess_exec(
        *process.command_line("endpoint", "remove", "a", "--wait"),
        env=process.environment({"OUTBOX_DSN": database.dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            yield removal
    finally:
        if removal.returncode is None:
            removal.kill()
            await removal.wait()


@pytest.mark.full
async def test_remove_can_wait_until_everything_is_delivered(database: Database) -> None:
    await add_endpoint(database, "a")
    await publish(database, 1, 2, 3)
    answering = asyncio.Event()

    async def response(_: Sent) -> AttemptResult:
        await answering.wait()
        return OK

    network = Network(response)
    async with running(database, network):
        await until(lambda: fetchval(database, "SELECT last_seq = 3 FROM lane_counter"))
        async with removing(database) as removal:
            assert removal.stderr is not None
            assert await removal.stderr.readline() == b'endpoint "a" has 3 pending deliveries\n'
            # Nothing new is for it any more.
            await publish(database, 4)
            answering.set()
            out, _ = await removal.communicate()
    assert (removal.returncode, out) == (0, b'removed endpoint "a"\n')
    assert network.data() == [1, 2, 3]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_waiting_removal_ends_when_the_endpoint_is_enabled(
    database: Database,
) -> None:
    await add_endpoint(database, "a")
    await fetchval(database, "UPDATE lane_counter SET last_seq = 1")
    async with removing(database) as removal:
        assert removal.stderr is not None
        assert b"has 1 pending delivery" in await removal.stderr.readline()
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.enable_endpoint(connection, "relay", "a", actor="test")
        assert b"was re-enabled by another command" in await removal.stderr.readline()
        assert await removal.wait() == 2
    assert await fetchval(database, "SELECT state FROM endpoint") == "active"


def test_remove_without_a_terminal_does_not_prompt(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", URL)
    both = here("endpoint", "remove", "a", "--wait", "--dead-letter")
    assert (both.code, both.error) == (2, "--dead-letter and --wait exclude each other")
    here("endpoint", "pause", "a")
    paused = here("endpoint", "remove", "a", "--wait")
    assert paused.code == 2
    assert "is paused; resume it first, or dead-letter its pending" in paused.error


@pytest.mark.parametrize(
    ("output", "code", "state"), sampled([(b"n\n", 2, "active"), (b"y\n", 0, "removing")])
)
async def test_remove_on_a_terminal_prompts(
    database: Database, output: bytes, code: int, state: str
) -> None:
    await add_endpoint(database, "a")
    await fetchval(database, "UPDATE lane_counter SET last_seq = 2")
    terminal, side = pty.openpty()
    try:
        removal = await asyncio.create_subprocess_exec(
            *process.command_line("endpoint", "remove", "a"),
            env=process.environment({"OUTBOX_DSN": database.dsn}),
            stdin=side,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=side,
        )
        os.close(side)
        shown = b""
        async with asyncio.timeout(30):
            while b"[y/N]" not in shown:
                shown += await asyncio.to_thread(os.read, terminal, 4096)
            os.write(terminal, output)
            assert await removal.wait() == code
    finally:
        os.close(terminal)
    assert b'endpoint "a" has 2 pending deliveries; dead-letter all?' in shown
    assert await fetchval(database, "SELECT state FROM endpoint") == state


def test_a_listing_shows_the_state_in_one_word(here: Command, database: Database) -> None:
    for name in ("drained", "failing", "fine", "paused"):
        here("endpoint", "add", name, URL)
    here("endpoint", "pause", "paused")
    sql = """
        UPDATE endpoint_health SET state = 'failing' FROM endpoint e
         WHERE e.id = endpoint_id AND e.name IN ('failing', 'paused');
        UPDATE subscription SET to_batch = 1 FROM endpoint e
         WHERE e.id = endpoint_id AND e.name = 'drained'
    """
    for statement in sql.split(";"):
        asyncio.run(fetchval(database, statement))
    words = [line.split()[5] for line in here("endpoint", "list").out.splitlines()[1:]]
    assert words == ["draining", "failing", "healthy", "paused"]


@pytest.mark.full
async def test_a_waiting_removal_can_be_interrupted(database: Database) -> None:
    await add_endpoint(database, "a")
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute("UPDATE lane_counter SET last_seq = 2")
        async with removing(database) as removal:
            assert removal.stderr is not None
            line = (await removal.stderr.readline()).decode()
            assert (
                line == 'endpoint "a" has 2 pending deliveries; no relay is running: outbox relay\n'
            )
            removal.send_signal(signal.SIGINT)
            _, err = await removal.communicate()
        assert removal.returncode == 130
        assert "or cancel: outbox endpoint enable a" in err.decode()
        assert await fetchval(database, "SELECT state FROM endpoint") == "active"
        # And it is taken back.
        await endpoint_states.enable_endpoint(db, "relay", "a", actor="test")


# --------------------------------------------------------------------- test


@contextmanager
def receiver(response: Callable[[web.Request], web.Response] | None = None) -> Iterator[Any]:
    """Run a receiver in a thread; yields its URL and the requests it received."""
    got: list[tuple[str, dict[str, str], bytes]] = []

    async def handle(request: web.Request) -> web.Response:
        got.append((request.method, dict(request.headers), await request.read()))
        return response(request) if response else web.Response(status=204)

    async def serve() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()
        await stop.wait()
        await runner.cleanup()

    port, ready, stop, loop = (
        free_port(),
        threading.Event(),
        asyncio.Event(),
        asyncio.new_event_loop(),
    )
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield f"http://127.0.0.1:{port}/in", got
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


def test_a_test_delivery_equals_other_deliveries(here: Command, database: Database) -> None:
    local = {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    with receiver() as (url, got):
        made = here(
            "endpoint",
            "add",
            "a",
            url,
            "--method",
            "PUT",
            "--header",
            "X-Env: prod",
            "--json",
            **local,
        ).json
        result = here("endpoint", "test", "a", "--json", **local)
        assert (result.code, result.json["outcome"]) == (0, "delivered")
        assert result.json["response"]["status"] == 204
        text = here("endpoint", "test", "a", **local).out
        assert f"sent      PUT {url}\nresponse  204\n" in text
        assert text.endswith("outcome   delivered\n")
    (method, headers, body), (_, _, second) = got
    assert (method, headers["X-Env"], headers["X-Sequence"]) == ("PUT", "prod", "1")
    verify(headers, body, [parse_secret(made["secret"])], time.time())
    sent = orjson.loads(body)
    assert (sent["type"], sent["sequence"], sent["previous_sequence"]) == ("outbox.test", 1, 0)
    assert sent["lane"] == headers["X-Lane"]
    assert sent["lane"].startswith(made["id"].replace("-", "")[:12] + "-test-")
    assert orjson.loads(second)["lane"] != sent["lane"]
    # Outside of everything: nothing is written.
    assert here("status", "--json").json["endpoints"][0]["pending"] == 0


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "says"),
    sampled(
        [
            (
                503,
                {"Retry-After": "30"},
                "retried",
                "retried after 0s to 5s (standard); the receiver requests",
            ),
            (400, {}, "dead_letter", "dead-lettered immediately"),
            (410, {}, "disabled", "dead-lettered, and the endpoint would be disabled"),
            (302, {"Location": "/x"}, "dead_letter", "dead-lettered immediately"),
        ]
    ),
)
def test_a_test_delivery_shows_how_the_relay_would_classify_the_response(
    here: Command, status: int, headers: dict[str, str], outcome: str, says: str
) -> None:
    local = {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}

    def response(_: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers, body=b"no\x1b[31m")

    with receiver(response=response) as (url, _):
        here("endpoint", "add", "a", url, **local)
        as_json = here("endpoint", "test", "a", "--json", **local)
        text = here("endpoint", "test", "a", **local)
    assert (as_json.code, text.code) == (1, 1)
    assert (as_json.json["response"]["status"], as_json.json["outcome"]) == (status, outcome)
    assert says in text.out
    assert "\x1b" not in text.out


def test_a_test_delivery_obeys_the_egress_rules(here: Command) -> None:
    here("endpoint", "add", "a", "http://127.0.0.1:9/", OUTBOX_ALLOW_NETWORKS="127.0.0.0/8")
    result = here("endpoint", "test", "a", "--json")
    assert result.code == 1
    failure = result.json["response"]["failure"]
    assert (failure, result.json["outcome"]) == ("egress_refused", "retried")
    missing = here("endpoint", "test", "b")
    assert missing.code == 2


def test_a_test_delivery_uses_the_outbound_proxy(here: Command) -> None:
    here("endpoint", "add", "a", "https://shop.example/")
    unknown_user = f"http://me:hunter2@127.0.0.1:{free_port()}"
    result = here("endpoint", "test", "a", "--json", OUTBOX_PROXY=unknown_user)
    assert result.json["response"]["failure"] == "connect"
    assert result.json["response"]["detail"].startswith(
        "the proxy: connection refused at 127.0.0.1:"
    )
    assert "hunter2" not in result.out + result.err


@pytest.mark.full
def test_no_endpoint_gets_a_hostile_url(outbox: Command) -> None:
    """A hostile URL is rejected before the database is used."""
    for url in hostile.URLS:
        # A shell cannot pass these as arguments.
        if "\0" in url:
            continue
        result = outbox("endpoint", "add", "x", "--", url, OUTBOX_DSN="postgresql://nowhere/")
        assert result.code == 2, url
        assert result.error.startswith("url: "), url


@pytest.mark.parametrize(
    ("network", "address"),
    sampled(
        [
            ("0.0.0.0/0", "169.254.169.254"),
            ("169.254.169.254/32", "169.254.169.254"),
            ("::/0", "fd00:ec2::254"),
            ("10.0.0.0/8", None),
        ],
        2,
    ),
)
def test_opening_a_metadata_service_prints_a_warning(
    here: Command, tmp_path: Path, network: str, address: str | None
) -> None:
    reason = f"{network} includes {address}, where clouds provide a machine's credentials"

    def warned(result: Result, name: str) -> bool:
        assert result.code in (0, 3), result.err
        return f"outbox: warning: {name}: {reason}; open narrower ranges\n" in result.err

    option = ("--allow-network", network)
    url = "https://example.com/"
    here("endpoint", "add", "a", url)
    file, c = tmp_path / "endpoints.json", {"name": "c", "url": url, "allow_networks": [network]}
    file.write_text(orjson.dumps({"endpoints": [c]}).decode())
    elsewhere = {"OUTBOX_DSN": "postgresql://127.0.0.1:1/x", "OUTBOX_ALLOW_NETWORKS": network}
    ended = asyncio.run(process.outbox("relay", env=elsewhere))
    relay = Result(ended.code, ended.stdout, ended.stderr)
    assert [
        warned(here("endpoint", "add", "b", url, *option), "--allow-network"),
        warned(here("endpoint", "update", "a", *option), "--allow-network"),
        warned(here("apply", "-f", str(file)), "endpoints[0].allow_networks"),
        warned(relay, "OUTBOX_ALLOW_NETWORKS"),
    ] == [address is not None] * 4
    # Another change does not repeat the warning.
    assert not warned(here("endpoint", "update", "a", "--lanes", 2), "--allow-network")


def test_an_unusable_certificate_is_reported_with_its_file(here: Command, tmp_path: Path) -> None:
    here("endpoint", "add", "a", URL)
    wrong = tmp_path / "client.pem"
    wrong.write_text("no certificate")
    refused = here("endpoint", "certificate", "a", str(wrong))
    assert refused.code == 2
    assert refused.error.startswith(f"FILE: {wrong}: ")
    assert "identity" not in refused.error


def test_the_number_of_trusted_authorities_is_shown(here: Command, tmp_path: Path) -> None:
    here("endpoint", "add", "a", URL)
    assert "ca               the system's" in here("endpoint", "show", "a").out
    authorities = tmp_path / "ca.pem"
    authorities.write_text(Authority("one").pem + Authority("two").pem)
    assert here("endpoint", "update", "a", "--ca", str(authorities)).code == 0
    assert (
        "ca               2 certificates, SHA-256 of the text " in here("endpoint", "show", "a").out
    )


def test_a_preview_is_printed_like_a_request(here: Command, database: Database) -> None:
    here("endpoint", "add", "a", f"{URL}?x=1", "--format", "raw", "--header", "X-Key: hidden")
    here("publish", "order.paid", "--key", "order-7", "--payload", '{"n": "a\u009b"}')
    shown = here("endpoint", "preview", "a", "order-7")
    head, _, body = shown.out.partition("\n\n")
    lines = head.splitlines()
    assert lines[0] == f"POST {URL}?x=1"
    assert {"X-Event: order.paid", "X-Event-Key: order-7", "X-Key: ***"} <= set(lines)
    assert body == '{"n": "a\\u009b"}\n', "safe for a terminal"
    assert here("endpoint", "preview", "a", "order-7", "--json").json["body"] == (
        '{"n": "a\u009b"}'
    )
    assert "lane and numbers are examples" in shown.err
    assert here("endpoint", "preview", "a", "order-8").code == 2
