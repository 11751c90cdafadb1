"""Settings: the precedence of their sources, and the errors for invalid values."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from outbox import setting_sources
from outbox.config import INTERNAL_FIELDS, Settings, load, secret_fields, variable_of
from outbox.core.model.encryption_keys import format_key
from outbox.errors import UsageError
from outbox.web.address import Address

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "hunter2xyz"
KEY = format_key(b"k" * 32)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_match_the_documentation() -> None:
    settings = load(env={})
    assert (settings.schema_name, settings.dsn_source) == ("relay", "")
    assert (settings.lease_s, settings.ack_group_ms, settings.drain_s) == (5.0, 20.0, 15.0)
    assert (settings.poll_s, settings.notify, settings.pooled) == (1.0, True, False)
    assert (settings.batch_events_max, settings.batch_deliveries_max) == (2000, 20_000)
    assert settings.allow_networks == ()
    assert (settings.health, settings.metrics_endpoints_max) == (None, 100)
    assert (settings.log_format, settings.log_level) == ("auto", "info")


def test_flags_then_variables_then_file_then_defaults(tmp_path: Path) -> None:
    (tmp_path / "outbox.toml").write_text("lease_s = 7\ndrain_s = 7\npoll_s = 7\n")
    env = {"OUTBOX_LEASE_S": "8", "OUTBOX_DRAIN_S": "8"}
    settings = load({"lease_s": 9, "drain_s": None}, env=env)
    assert (settings.lease_s, settings.drain_s, settings.poll_s) == (9, 8, 7)
    assert settings.ack_group_ms == 20


def test_every_field_has_a_variable_and_a_description() -> None:
    values: dict[str, str] = {
        "dsn": "x",
        "pooled": "yes",
        "schema_name": "s",
        "secret": "whsec_x",
        "key": KEY,
        "notify": "off",
        "buffer_bytes_max": "2000000",
        "allow_networks": "10.0.0.0/8,::1",
        "egress_addresses": "203.0.113.7",
        "proxy": "http://proxy.internal:4750",
        "health": "localhost:9090",
        "admin": "127.0.0.1:0",
        "receivers": "127.0.0.1:1",
        "log_format": "JSON",
        "log_level": "Debug",
    }
    names = [name for name in Settings.model_fields if name not in INTERNAL_FIELDS]
    env = {variable_of(name): values.get(name, "2") for name in names}
    settings = load(env=env)
    defaults = load(env={})
    for name in names:
        assert getattr(settings, name) != getattr(defaults, name), name
        assert Settings.model_fields[name].description, name
    assert variable_of("schema_name") == "OUTBOX_SCHEMA"
    assert settings.allow_networks == (
        ipaddress.ip_network("10.0.0.0/8"),
        ipaddress.ip_network("::1"),
    )
    assert settings.health == Address("localhost", 9090)
    assert (settings.log_format, settings.log_level) == ("json", "debug")


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        load(env={}).lease_s = 3


def test_secrets_can_be_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert secret_fields() == ["dsn", "api_dsn", "secret", "key", "proxy"]
    for name in secret_fields():
        texts = {"key": KEY, "proxy": f"http://me:{SECRET}@proxy:4750"}
        text = texts.get(name, SECRET)
        path.write_text(f"{text}\n")
        settings = load(env={f"{variable_of(name)}_FILE": str(path)})
        assert getattr(settings, name).get_secret_value() == text
        assert text not in repr(settings)
        with pytest.raises(UsageError, match=f"{variable_of(name)}_FILE: /nowhere: No such file"):
            load(env={f"{variable_of(name)}_FILE": "/nowhere"})
        with pytest.raises(UsageError, match="are both set; keep one"):
            load(env={f"{variable_of(name)}_FILE": str(path), variable_of(name): "x"})
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        load(env={"OUTBOX_DSN_FILE": str(path)})


@pytest.mark.parametrize(
    ("flags", "env", "source"),
    [
        ({"dsn": "a"}, {"OUTBOX_DSN": "b", "DATABASE_URL": "c", "PGHOST": "d"}, "--dsn"),
        ({}, {"OUTBOX_DSN": "a", "DATABASE_URL": "c", "PGHOST": "d"}, "OUTBOX_DSN"),
        ({}, {"DATABASE_URL": "a", "PGHOST": "d"}, "DATABASE_URL"),
        ({}, {"OUTBOX_DSN": "", "DATABASE_URL": "a"}, "DATABASE_URL"),
        ({}, {"PGHOST": "d"}, "PGHOST"),
        ({}, {"PGSERVICE": "d"}, "PGSERVICE"),
        ({}, {"PGPASSWORD": "d"}, ""),
    ],
)
def test_the_database_is_read_from_every_source(
    flags: dict[str, Any], env: dict[str, str], source: str
) -> None:
    settings = load(flags, env=env)
    assert settings.dsn_source == source
    # libpq's variables are read when the DSN is parsed, not before.
    from_libpq = source == "" or source.startswith("PG")
    assert settings.dsn.get_secret_value() == ("" if from_libpq else "a")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"OUTBOX_LEASE_S": "abc"}, "OUTBOX_LEASE_S: must be a valid number"),
        ({"OUTBOX_LEASE_S": "0.5"}, "OUTBOX_LEASE_S: must be greater than or equal to 1"),
        ({"OUTBOX_LEASE_S": "nan"}, "OUTBOX_LEASE_S: must be a finite number"),
        ({"OUTBOX_IN_FLIGHT_MAX": "1.5"}, "OUTBOX_IN_FLIGHT_MAX: must be a valid integer"),
        ({"OUTBOX_NOTIFY": "maybe"}, "OUTBOX_NOTIFY: must be true or false"),
        ({"OUTBOX_LOG_FORMAT": "xml"}, "OUTBOX_LOG_FORMAT: must be 'auto', 'json' or 'console'"),
        ({"OUTBOX_SCHEMA": "é" * 26}, "OUTBOX_SCHEMA: the schema's name is longer than 50 bytes"),
        (
            {"OUTBOX_ALLOW_NETWORKS": "lo"},
            'OUTBOX_ALLOW_NETWORKS: "lo" is not an address range',
        ),
        ({"OUTBOX_ALLOW_NETWORKS": "\udcff"}, "OUTBOX_ALLOW_NETWORKS: not UTF-8 text"),
        ({"OUTBOX_ADMIN": "h\udcff:80"}, "OUTBOX_ADMIN: not UTF-8 text"),
        ({"OUTBOX_ALLOW_NETWORKS": "10.1.0.0/8"}, "did you mean 10.0.0.0/8?"),
        ({"OUTBOX_PROXY": f"socks5://a:{SECRET}@p:1"}, "OUTBOX_PROXY: must look like http://host"),
    ],
)
def test_an_invalid_value_error_names_the_setting_in_one_line(
    env: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(env=env)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leas_s = 4", 'there is no setting "leas_s"; did you mean "lease_s"?'),
        ("zzz = 4", 'there is no setting "zzz"'),
        ('lease_s = "4x"', "outbox.toml, lease_s: must be a valid number"),
        ("allow_networks = [5]", "allow_networks: 5 is not a string such as 10.0.0.0/8"),
        ("allow_networks = 5", "outbox.toml, allow_networks: must be comma-separated ranges"),
        ("lease_s = \n", "outbox.toml: Invalid value (at line 1"),
        (f'dsn = ["{SECRET}"]', "outbox.toml, dsn: must be a valid string"),
    ],
)
def test_an_invalid_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "outbox.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load(env={})
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_can_be_specified(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = "mine"\nallow_networks = ["10.0.0.0/8"]\n')
    assert load(env={}).schema_name == "relay"
    assert load(env={}, config=path).schema_name == "mine"
    assert load(env={"OUTBOX_CONFIG": str(path)}).schema_name == "mine"
    for arguments in ({"config": "nix.toml"}, {"env": {"OUTBOX_CONFIG": "nix.toml"}}):
        with pytest.raises(UsageError, match=r"nix\.toml: the settings file does not exist"):
            load(**{"env": {}, **arguments})
    (tmp_path / "directory").mkdir()
    with pytest.raises(UsageError, match="directory: Is a directory"):
        load(env={}, config=tmp_path / "directory")


@pytest.fixture
def as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of these tests belong to another user, who is not root."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(setting_sources, "ROOT_UID", uid + 2)


@pytest.mark.usefixtures("as_another_user")
def test_a_file_of_another_user_is_obeyed_only_if_it_was_named(tmp_path: Path) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text('allow_networks = ["0.0.0.0/0"]')
    refused = rf"^{path} is refused, because it belongs to another user \(uid \d+\); [^\n]+$"
    with pytest.raises(UsageError, match=refused):
        load(env={})
    assert load(env={}, config="outbox.toml").allow_networks
    assert load(env={"OUTBOX_CONFIG": "outbox.toml"}).allow_networks


def test_a_file_of_root_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outbox.toml").write_text("poll_s = 7")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(setting_sources, "ROOT_UID", uid)
    assert load(env={}).poll_s == 7


def test_a_file_that_every_user_may_write_is_obeyed_only_if_it_was_named(tmp_path: Path) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text("poll_s = 7")
    path.chmod(0o664)
    assert load(env={}).poll_s == 7
    path.chmod(0o666)
    with pytest.raises(UsageError, match="is refused, because every user may write to it"):
        load(env={})
    assert load(env={}, config=path).poll_s == 7


@pytest.mark.slow
@pytest.mark.system
def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "outbox.toml", 0o600)
    command = [sys.executable, "-c", "from outbox.config import load; load(env={})"]
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        command, check=False, cwd=tmp_path, env=env, timeout=30, capture_output=True, text=True
    )
    assert "outbox.toml is refused, because it is not a regular file" in ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a link to another user")
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("poll_s = 7")
    link = tmp_path / "outbox.toml"
    link.symlink_to("mine.toml")
    assert load(env={}).poll_s == 7
    os.chown(link, 1, 1, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"belongs to another user \(uid 1\)"):
        load(env={})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("OUTBOX_LEASE", "OUTBOX_LEASE_S"),
        ("OUTBOX_ALLOWED_NETWORKS", "OUTBOX_ALLOW_NETWORKS"),
        ("OUTBOX_KEYFILE", "OUTBOX_KEY_FILE"),
        ("OUTBOX_SCHEMA_NAME", "OUTBOX_SCHEMA"),
        ("OUTBOX_DNS", "OUTBOX_DSN"),
        ("OUTBOX_PROXY_PORT", "OUTBOX_PROXY"),
        ("OUTBOX_LEASE_S_FILE", "OUTBOX_LEASE_S"),
    ],
)
def test_an_unknown_variable_names_the_nearest_setting(name: str, nearest: str) -> None:
    expected = f'^{name}: there is no such setting; did you mean "{nearest}"\\?$'
    with pytest.raises(UsageError, match=expected):
        load(env={name: SECRET})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTBOX_SERVICE_HOST", "10.0.0.7"),
        ("OUTBOX_SERVICE_PORT", "8080"),
        ("OUTBOX_SERVICE_PORT_HTTP_API", "8080"),
        ("OUTBOX_PORT", "tcp://10.0.0.7:8080"),
        ("OUTBOX_PORT_8080_TCP", "tcp://10.0.0.7:8080"),
        ("OUTBOX_PORT_8080_TCP_ADDR", "10.0.0.7"),
        ("OUTBOX_PORT_8080_TCP_PORT", "8080"),
        ("OUTBOX_PORT_8080_TCP_PROTO", "tcp"),
        # Of the Service outbox-relay.
        ("OUTBOX_RELAY_PORT", "tcp://10.0.0.7:8080"),
        ("OUTBOX_RELAY_SERVICE_HOST", "10.0.0.7"),
        # Unset in a compose file.
        ("OUTBOX_LEASE", ""),
        ("OUTBOX_DEBUG", "1"),
        ("OUTBOX_PG_BIN", "/opt/bin"),
        ("OTHER_OUTBOX_LEASE", "1"),
    ],
)
def test_variables_that_are_no_settings_are_ignored(name: str, value: str) -> None:
    assert load(env={name: value}) == load(env={})


@pytest.mark.slow
@pytest.mark.system
def test_nothing_is_read_at_import() -> None:
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "OUTBOX_LEASE_S": "x", "OUTBOX_CONFIG": "nix"}
    subprocess.run([sys.executable, "-c", "import outbox.config"], check=True, env=env)


def test_an_invalid_flag_is_named_as_typed() -> None:
    for name, flag in (("lease_s", "--lease"), ("drain_s", "--drain")):
        with pytest.raises(UsageError, match=f"^{flag}: "):
            load({name: -1}, env={})
