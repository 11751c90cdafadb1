"""All forms of a database address are parsed, and no error shows a password."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.config import load
from outbox.errors import CannotRun, UsageError
from outbox.store.connection import dsn
from outbox.store.connection.dsn import Dsn, parse

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "hunter2xyz"


def understood(text: str, **env: str) -> Dsn:
    return parse(text, source="--dsn", env=env)


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://ann:{SECRET}@db.example.com:5433/app",
        f"postgres://ann:{SECRET}@db.example.com:5433/app",
        f"postgresql+asyncpg://ann:{SECRET}@db.example.com:5433/app",
        f"postgresql+psycopg://ann:{SECRET}@db.example.com:5433/app",
        f"postgresql+psycopg2://ann:{SECRET}@db.example.com:5433/app",
        f"POSTGRESQL://ann:{SECRET}@db.example.com:5433/app",
        f"  postgresql://ann:{SECRET}@db.example.com:5433/app\n",
        f"postgresql://db.example.com:5433/app?user=ann&password={SECRET}",
        f"postgresql://?host=db.example.com&port=5433&dbname=app&user=ann&password={SECRET}",
        f"host=db.example.com port=5433 dbname=app user=ann password={SECRET}",
        f"  host = db.example.com\n port='5433' dbname=app user=ann password='{SECRET}' ",
        f"host=db.example.com port=5433 database=app username=ann password={SECRET}",
    ],
)
def test_all_dsn_forms_are_equivalent(text: str) -> None:
    found = understood(text)
    assert found.addresses == (("db.example.com", 5433),)
    assert (found.database, found.user, found.password) == ("app", "ann", SECRET)
    assert found.warnings == ()
    assert str(found) == 'database "app" at db.example.com:5433'
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("text", "addresses", "target"),
    [
        ("postgresql://a,b/x", (("a", 5432), ("b", 5432)), "primary"),
        ("postgresql://a:1,b:2/x", (("a", 1), ("b", 2)), "primary"),
        ("postgresql://a:1,b/x?target_session_attrs=any", (("a", 1), ("b", 5432)), "any"),
        ("host=a,b port=1,2", (("a", 1), ("b", 2)), "primary"),
        ("host=a,b port=7", (("a", 7), ("b", 7)), "primary"),
        ("postgresql://[::1]:6000,[fe80::1]/x", (("::1", 6000), ("fe80::1", 5432)), "primary"),
        ("host=::1 port=6000", (("::1", 6000),), "any"),
        ("host=name hostaddr=10.0.0.1", (("10.0.0.1", 5432),), "any"),
    ],
)
def test_several_hosts_are_parsed(
    text: str, addresses: tuple[tuple[str, int], ...], target: str
) -> None:
    found = understood(text)
    assert found.addresses == addresses
    assert found.target_session_attrs == target


@pytest.mark.parametrize(
    "text",
    [
        "postgresql:///app?host=/var/run/pg",
        "postgresql://%2Fvar%2Frun%2Fpg/app",
        "postgresql+asyncpg:///app?host=/var/run/pg",
        "host=/var/run/pg dbname=app",
    ],
)
def test_unix_sockets_are_parsed(text: str) -> None:
    found = understood(text)
    assert found.addresses == (("/var/run/pg", 5432),)
    assert str(found) == 'database "app" at /var/run/pg/.s.PGSQL.5432'


def test_percent_encoding_is_strict_and_plus_is_literal() -> None:
    found = understood("postgresql://a%40b:p%2Fw%3A+%C3%A9@h/d%20b?application_name=a+b%26c")
    assert (found.user, found.password, found.database) == ("a@b", "p/w:+é", "d b")
    assert found.server_settings == {"application_name": "a+b&c"}


def test_quotes_and_escapes_are_parsed() -> None:
    found = understood(r"user='a b' password='it\'s \\ me' dbname=a\ b host=''")
    assert (found.user, found.password, found.database) == ("a b", r"it's \ me", "a b")


@given(user=st.text(min_size=1), password=st.text(min_size=1), database=st.text(min_size=1))
def test_quoted_values_round_trip(user: str, password: str, database: str) -> None:
    values = {"user": user, "password": password, "dbname": database}
    if any("\0" in v or not v.isprintable() for v in values.values()):
        return

    def quoted(value: str) -> str:
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    text = " ".join(f"{name}={quoted(value)}" for name, value in values.items())
    found = understood(text + " host=h")
    assert (found.user, found.password, found.database) == (user, password, database)


def test_the_environment_supplies_omitted_parameters() -> None:
    env = {
        "PGHOST": "h",
        "PGPORT": "6",
        "PGUSER": "u",
        "PGPASSWORD": SECRET,
        "PGDATABASE": "d",
        "PGSSLMODE": "disable",
        "PGCONNECT_TIMEOUT": "7",
        "PGAPPNAME": "n",
    }
    found = understood("", **env)
    assert found.addresses == (("h", 6),)
    assert (found.user, found.password, found.database) == ("u", SECRET, "d")
    assert (found.sslmode, found.connect_timeout_s) == ("disable", 7.0)
    given = understood("postgresql://other/db", **env)
    assert given.addresses == (("other", 6),)
    assert (given.user, given.database) == ("u", "db")


def test_a_host_overrides_the_address_of_another_source() -> None:
    found = understood("host=mine", PGHOST="theirs", PGHOSTADDR="10.0.0.9")
    assert found.addresses == (("mine", 5432),)


def test_service_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "services.conf"
    path.write_text("# comment\n[orders]\nhost=h\nport=7\ndbname=d\nuser=u\npassword=p%25w\n")
    found = understood("service=orders dbname=mine", PGSERVICEFILE=str(path), PGUSER="env")
    assert found.addresses == (("h", 7),)
    assert (found.user, found.password, found.database) == ("u", "p%25w", "mine")
    assert understood("", PGSERVICE="orders", PGSERVICEFILE=str(path)) == parse(
        f"postgresql://?service=orders&servicefile={path}", source="--dsn", env={}
    )
    with pytest.raises(UsageError, match='service "nix" is in none of the service files'):
        understood("service=nix", PGSERVICEFILE=str(path))


def test_parameters_are_translated() -> None:
    found = understood(
        "postgresql://h/d?sslmode=verify-full&sslrootcert=/ca.pem&connect_timeout=3"
        "&options=-c%20geqo%3Doff&keepalives_idle=9&tcp_user_timeout=4000"
        "&fallback_application_name=fall&krbsrvname=pg&client_encoding=utf8"
    )
    assert found.warnings == ()
    assert found.sslmode == "verify-full"
    assert found.tls == {"sslrootcert": "/ca.pem"}
    assert found.connect_timeout_s == 3.0
    assert found.server_settings == {"options": "-c geqo=off", "application_name": "fall"}
    assert found.keepalives == {"keepalives_idle": 9, "tcp_user_timeout": 4000}
    arguments = found.asyncpg_arguments()
    assert arguments["ssl"] == "verify-full"
    assert arguments["dsn"] == "postgresql://?sslrootcert=%2Fca.pem"
    assert arguments["krbsrvname"] == "pg"


def test_system_certificates_are_used() -> None:
    arguments = understood("postgresql://h/d?sslrootcert=system").asyncpg_arguments()
    assert arguments["ssl"] is True
    assert "dsn" not in arguments


@pytest.mark.parametrize(
    ("query", "sslmode", "cache"),
    [
        ("ssl=require", "require", True),
        ("ssl=true", "require", True),
        ("pgbouncer=true", None, False),
        ("prepared_statement_cache_size=0", None, False),
        ("statement_cache_size=100", None, True),
    ],
)
def test_parameters_of_other_libraries_are_ignored(
    query: str, sslmode: str | None, cache: bool
) -> None:
    found = understood(f"postgresql+asyncpg://h/d?{query}")
    assert (found.sslmode, found.statement_cache) == (sslmode, cache)
    assert found.warnings == ()


def test_unknown_parameters_are_ignored_with_a_warning() -> None:
    found = understood("postgresql://h/d?channel_binding=require&load_balance_hosts=random")
    assert found.warnings == (
        '--dsn: ignored parameter "channel_binding"',
        '--dsn: ignored parameter "load_balance_hosts"',
    )
    # Behind a badly quoted password, its rest would be taken for a name.
    found = understood(f"host=h password=a {SECRET}=b")
    assert found.warnings == ("--dsn: ignored an unknown parameter",)


def test_a_zero_time_out_is_the_default() -> None:
    assert understood("postgresql://h/d?connect_timeout=0").connect_timeout_s == 5.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"mysql://u:{SECRET}@h/d", 'mysql:" is not PostgreSQL'),
        (f"jdbc:postgresql://h/d?password={SECRET}", 'jdbc:" is not PostgreSQL'),
        ("localhost", "neither postgresql://"),
        (SECRET, "neither postgresql://"),
        (f"postgresql:/u:{SECRET}@h/d", "two slashes"),
        (f"postgresql://u:{SECRET}@h:port/d", "not host:port"),
        (f"postgresql://u:p/{SECRET}@h/d", "%2F"),
        (f"postgresql://u:p@x/{SECRET}@h/d", "%40"),
        (f"postgresql://u:12/{SECRET}?a=b@h/d", "%3F"),
        (f"postgresql://u:12?{SECRET}=b@h/d", "%3F"),
        (f"postgresql://u:p@{SECRET}?a=b@h/d", "%3F"),
        (f"postgresql://u:p%zz{SECRET}@h/d", "two hex digits"),
        (f"postgresql://u:{SECRET}%00@h/d", "%00"),
        (f"postgresql://u:{SECRET}\udcff@h/d", "not UTF-8"),
        (f"host=h password={SECRET}\udcff", "not UTF-8"),
        (f"host=postgresql://u:{SECRET}@h/d port=5432", 'a host has "@" in it'),
        (f"postgresql://u:%ff{SECRET}@h/d", "not UTF-8"),
        (f"postgresql://u:{SECRET}@h:70000/d", "between 1 and 65535"),
        (f"postgresql://u:{SECRET}@h:0/d", "between 1 and 65535"),
        (f"postgresql://u:{SECRET}@h/d?sslmode", 'has no "="'),
        (f"postgresql://u:{SECRET}@h/d?sslmode=maybe", "sslmode must be one of disable"),
        (f"postgresql://u:{SECRET}@h/d?connect_timeout=soon", "not a whole number"),
        (f"postgresql://u:{SECRET}@h/d?target_session_attrs=x", "one of any, primary"),
        (f"postgresql://u:{SECRET}@h/d?port=1,2", "2 ports for 1 hosts"),
        (f"host=h password=my {SECRET}", "pair 3 is not key=value"),
        (f"host=h password='{SECRET}", "pair 2 is not key=value"),
        (f"host=h password={SECRET}\0", "NUL"),
    ],
)
def test_errors_do_not_contain_the_password(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        understood(text)
    message = str(caught.value)
    assert message.startswith("--dsn is not a database address: ")
    assert says in message
    assert SECRET not in message
    assert "\n" not in message


@given(st.text())
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    try:
        understood(text)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_settings_name_a_database() -> None:
    settings = load(env={"PGHOST": "h", "PGDATABASE": "d"})
    assert dsn.from_settings(settings, {"PGHOST": "h", "PGDATABASE": "d"}).addresses == (
        ("h", 5432),
    )
    with pytest.raises(CannotRun, match="no database was named"):
        dsn.from_settings(load(env={}), {})
