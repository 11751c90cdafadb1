"""The settings of the API's process: what it is told, and by which way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.api_settings import api_fields, for_api, hand_over, take_over
from outbox.config import INTERNAL_FIELDS, Settings, load, readers_of
from outbox.core.model.encryption_keys import format_key
from outbox.errors import UsageError
from outbox.store.connection import dsn

if TYPE_CHECKING:
    from collections.abc import Mapping

KEYS = [format_key(bytes([n]) * 32) for n in range(2)]
GIVEN = {
    "OUTBOX_DSN": "postgresql://relay:hunter2@localhost/app",
    "OUTBOX_POOLED": "1",
    "OUTBOX_SCHEMA": "mine",
    "OUTBOX_KEY": KEYS[0],
    "OUTBOX_NOTIFY": "0",
    "OUTBOX_RETENTION_EVENTS_DAYS": "1",
    "OUTBOX_RETENTION_LOG_DAYS": "2",
    "OUTBOX_RETENTION_DEAD_LETTERS_DAYS": "3",
    "OUTBOX_ALLOW_NETWORKS": "10.0.0.0/8,::1/128",
    "OUTBOX_PROXY": "http://me:hunter2@proxy:1",
    "OUTBOX_API_RATE_MAX": "7",
    "OUTBOX_EGRESS_ADDRESSES": "203.0.113.7",
    "OUTBOX_LOG_FORMAT": "json",
    "OUTBOX_LOG_LEVEL": "debug",
}
OF_PARENT = {"api_dsn", "health", "admin", "receivers"}


def handed(env: Mapping[str, str]) -> tuple[str, Settings]:
    """What goes through the pipe, and what the child makes of it."""
    text = orjson.dumps(hand_over(load(env=env))).decode()
    return text, take_over(orjson.loads(text))


def test_every_setting_names_the_processes_that_read_it() -> None:
    for name, field in Settings.model_fields.items():
        assert name in INTERNAL_FIELDS or readers_of(field), name


def test_the_child_has_all_settings_of_the_api_and_no_other() -> None:
    env = {**GIVEN, "OUTBOX_LEASE_S": "3", "OUTBOX_ADMIN": "127.0.0.1:1"}
    parent, (_, child), defaults = load(env=env), handed(env), load(env={})
    for name in Settings.model_fields:
        if name in OF_PARENT or name not in {*api_fields(), "dsn_source"}:
            expected = getattr(defaults, name)
        else:
            expected = getattr(parent, name)
            assert expected != getattr(defaults, name), f"{name}: give it a value in this test"
        assert getattr(child, name) == expected, name


def test_the_api_reads_no_other_setting() -> None:
    """By the attributes that its modules read, and those of what it calls with its settings."""
    root = Path(__file__).parents[1]
    places = [*(root / "packages/api/outbox_api").rglob("*.py")]
    places += [root / "packages/doctor/outbox_doctor/check.py", root / "outbox/telemetry/logs.py"]
    places += [root / "outbox/destinations/endpoint_validation.py"]
    read = {
        name
        for place in places
        for name in re.findall(r"settings\.(\w+)", place.read_text(encoding="utf-8"))
        if name in Settings.model_fields
    }
    assert {"schema_name", "notify", "api_rate_max"} <= read
    assert read <= set(api_fields())


def test_secrets_with_a_file_are_handed_over_by_its_name(tmp_path: Path) -> None:
    values = {"DSN": GIVEN["OUTBOX_DSN"], "KEY": KEYS[0], "PROXY": GIVEN["OUTBOX_PROXY"]}
    env = {}
    for name, value in values.items():
        (tmp_path / name).write_text(value)
        env[f"OUTBOX_{name}_FILE"] = str(tmp_path / name)
    text, child = handed(env)
    assert not re.search("hunter|" + KEYS[0], text)
    assert child.dsn.get_secret_value() == values["DSN"]
    assert child.proxy is not None
    assert child.proxy.get_secret_value() == values["PROXY"]
    (tmp_path / "KEY").write_text(KEYS[1])
    _, later = handed(env)
    assert later.key is not None
    assert later.key.get_secret_value() == KEYS[1]
    given = hand_over(load(env=env))
    (tmp_path / "KEY").unlink()
    with pytest.raises(UsageError, match=r"OUTBOX_KEY_FILE: .*No such file"):
        take_over(given)


@pytest.mark.parametrize("from_file", [False, True])
def test_the_api_has_a_role_of_its_own(tmp_path: Path, from_file: bool) -> None:
    own = "postgresql://api:hunter2@localhost/app"
    path = tmp_path / "dsn"
    path.write_text(own)
    named = {"OUTBOX_API_DSN_FILE": str(path)} if from_file else {"OUTBOX_API_DSN": own}
    env = {"OUTBOX_DSN": GIVEN["OUTBOX_DSN"], **named}
    settings = load(env=env)
    assert dsn.from_settings(settings).user == "relay"
    for each in (for_api(settings), handed(env)[1]):
        assert dsn.from_settings(each).user == "api"
        source = dsn.from_settings(each).source
        assert source == ("OUTBOX_API_DSN_FILE" if from_file else "OUTBOX_API_DSN")
        assert each.secret_files.get("dsn") == (str(path) if from_file else None)
    assert ("//api:hunter2" in handed(env)[0]) is not from_file
