"""Configuration files: the declaration of endpoints, and the settings."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path

import orjson

from outbox.cli.document import read_document
from outbox.config import load
from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_settings import SETTINGS, EndpointSettings
from outbox.errors import UsageError
from tests.fuzz.data import Data, fields
from tests.fuzz.target import Target, hold, refused

_PLACE = tempfile.TemporaryDirectory(prefix="outbox-fuzz-")
atexit.register(_PLACE.cleanup)
SECRET = "Zq9vX2kPw"


def declarations(raw: bytes) -> None:
    """A file of endpoints is rejected in one line, or round-trips."""
    data = Data(raw)
    path = Path(_PLACE.name) / data.pick(("a.yaml", "a.json", "a.toml"))
    path.write_bytes(data.rest())
    try:
        declared = endpoint_config.parse_file(read_document(str(path)))
    except UsageError as error:
        refused(error, "declaration")
        return
    for each in declared:
        hold(EndpointSettings.from_dict(each.settings.to_dict()) == each.settings, "kept otherwise")
        orjson.dumps(each.settings.to_dict())
    written = [endpoint_config.to_file_values(each.settings) for each in declared]
    again = endpoint_config.parse_file({"endpoints": written})
    for one, other in zip(declared, again, strict=True):
        # Headers are written without their values, which stay as stored.
        settings = other.merge_over(one.settings)
        hold(settings == one.settings, "reads otherwise")
        hold(not endpoint_config.differences(one.settings, settings), "there is a difference")


def settings(raw: bytes) -> None:
    """Settings are rejected in one line that shows no secret, or are accepted."""
    data = Data(raw)
    env = {data.pick(_VARIABLES): data.text().replace("\0", "") for _ in range(data.number(3))}
    env = {name: value + SECRET if name in _SECRET else value for name, value in env.items()}
    path = Path(_PLACE.name) / "outbox.toml"
    path.write_bytes(data.rest().replace(b"SECRET", SECRET.encode()))
    try:
        read = load(config=path, env=env)
    except UsageError as error:
        refused(error, "settings")
        # The name of a setting is no secret, even if the input has the secret in it.
        message = str(error).replace(f'there is no setting "{SECRET}', "")
        is_hidden = (
            f'dsn = "{SECRET}' in path.read_text("utf-8", "replace") or SECRET not in message
        )
        hold(is_hidden or f'"{SECRET}' not in message, f"it shows a secret: {message}")
    else:
        hold(SECRET not in f"{read!r}{read}", f"it shows a secret: {read!r}")
        hold(read.lease_s >= 1 and read.drain_s >= 0 and read.poll_s > 0, f"{read!r}")


_SECRET = ("OUTBOX_DSN", "DATABASE_URL", "OUTBOX_SECRET")
_VARIABLES = (
    *_SECRET, "OUTBOX_SCHEMA", "OUTBOX_LEASE_S", "OUTBOX_ALLOW_NETWORKS", "OUTBOX_ADMIN",
    "OUTBOX_POOLED", "OUTBOX_LOG_LEVEL", "OUTBOX_DSN_FILE", "OUTBOX_POLL_S", "PGHOST",
    "OUTBOX_RETENTION_LOG_DAYS", "OUTBOX_IN_FLIGHT_MAX", "OUTBOX_HEALTH", "OUTBOX_LEASE",
)  # fmt: skip

_YAML = """0defaults: &d {retry: patient}
endpoints:
  - &e {name: a, url: "https://a.example/", types: [order.*, refund.done], lanes: 4}
  - <<: *e
    name: b
    retry: {preset: stepped, attempts: 8, age: 2d}
    headers: {X-Key: "v"}
    retryable: [429, 5xx]
    filter: "@.total > 100"
"""
_BOMB = "0a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefgh",
    "bcdefghi", strict=True)
)  # fmt: skip
_ONE = {"name": "a", "url": "https://a.example/", "timeout": "5s", "tenant": None, "method": "PUT"}

TARGETS = (
    Target(
        name="declarations",
        short_run_modules=(
            "outbox.cli.document", "outbox.core.model.endpoint_config",
            "outbox.core.model.endpoint_settings", "outbox.core.model.retry_policy",
        ),
        one=declarations,
        seeds=(
            _YAML.encode(), _BOMB.encode() + b"endpoints: [{name: *i, url: x}]",
            _BOMB.encode() + b"? *i\n: x\n",
            b"0endpoints: [{name: x, url: y, id: 12345678-1234-1234-1234-123456789abc}]",
            b"1" + orjson.dumps({"endpoints": [_ONE], "defaults": {"retry": {"base": "1s"}}}),
            b'2[[endpoints]]\nname = "a"\nurl = "https://a.example/"\n[defaults]\ntimeout = 3.5\n',
            b"0&a [*a]", b"0endpoints: !!python/object:os.system [x]", b"0" + b"[" * 500,
        ),
        words=(*SETTINGS, "type", "header", "endpoints:", "defaults:",
               "- name: ", "&x ",
               "*x", "<<: ", "!!set", "!!binary ", "!!timestamp ", "2001-01-01", "0x", "1_000",
               ".inf",
               ".nan", "~", "? ", "|\n ", "%YAML 1.1\n", "---\n", "\x00", "1e999", "null", "true",
               "id: ", "\u2028", b"\xff", "[[", "{", "}", "'", '"', "\\ud800", "0o17", "preset: ",
               "1:30:00", "!!float x", "!!int x", "!!bool x"),
        bytes_max=900,
        runs=250,
    ),
    Target(
        name="settings",
        short_run_modules=("outbox.config", "outbox.web.address"),
        one=settings,
        seeds=(
            fields("10postgresql://u:",
            'schema = "relay"\nlease_s = 5\nallow_networks = ["10.0.0.0/8"]'),
            fields("3510.0.0.0/8, ::1", "4x", "6127.0.0.1:80", 'dsn = "SECRET"\n'),
            fields("1:x", 'log_level = "INFO"\nhealth = ":80"\npooled = true'),
            fields("0", "admin = 5\nretention_log_days = inf"),
        ),
        words=("schema = ", "dsn = ", "secret = ", "allow_networks = ", "[", "]", '"', "'''", "inf",
               "nan",
               "1_0", "0x", "true", "lease_s", "drain_s", "\n", "[table]", "SECRET", "::1/128",
               "[::]:80",
               ":99999", "1979-05-27", "-1", "1e400", '"\\u0000"', "notify", "in_flight_max"),
        runs=400,
    ),
)  # fmt: skip
