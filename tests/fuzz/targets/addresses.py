"""Addresses: of databases, and of endpoints."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from yarl import URL

from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.store.connection import dsn
from tests.fuzz.data import Data, fields
from tests.fuzz.target import Target, hold, refused

_CLOSED = EgressPolicy()
_OPEN = EgressPolicy(["10.0.0.0/8", "fd00::/8"])

SECRET = "Zq9vX2kPw"
_ENVIRONMENT = {"HOME": "/nonexistent", "PGUSER": "app", "PGPASSWORD": SECRET}


def urls(raw: bytes) -> None:
    """A URL that is let through names no address that a connection to would be refused."""
    text = raw.decode("utf-8", "surrogateescape")
    for policy in (_CLOSED, _OPEN):
        reason = policy.refusal_of_url(text)
        if reason is not None:
            refused(UsageError(reason), "url")
            continue
        url = URL(text)
        host, port = url.raw_host, url.port
        hold(host and port, f"{text!r} has no host or port")
        assert host is not None
        assert port is not None
        hold(text.isascii() and text.isprintable(), f"{text!r} is not printable")
        hold(text.lower().startswith(("http://", "https://")), f"{text!r} is neither")
        hold(url.user is None and url.password is None and not url.fragment, f"{text!r}")
        # What a resolver takes for an address without asking anybody.
        try:
            found = socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            if not policy.allow_networks:
                hold(url.scheme == "https" and port in (443, 8443), f"{text!r}")
            continue
        for *_, address in found:
            at = ip_address(str(address[0]))
            no = policy.refusal(at, port=port, tls=url.scheme == "https")
            hold(no is None, f"{text!r} leads to {at}: {no}")
        ip_address(host)


def databases(raw: bytes) -> None:
    """A database's address is read or refused, and a password is never shown."""
    data = Data(raw)
    # The password stands where the first reader of a text would look for it.
    form = data.pick(("{0}://{1}:{2}@{3}", "{1} password={2} {3}", "password='{2}' {3}", "{0}{3}"))
    scheme = data.pick(("postgresql", "postgres", "postgresql+asyncpg", "POSTGRESQL"))
    user, before, behind, rest = (data.text() for _ in range(4))
    if "{1}:{2}" in form:
        # What comes behind the first colon and before the last @ is the password.
        user = user.translate(str.maketrans("", "", ":/?#@"))
        rest = rest.replace("@", "")
    elif "{2}" in form:
        # Otherwise it could really be the value of another parameter.
        user, before = (each.translate(str.maketrans("", "", "'=\\:")) for each in (user, before))
    password = before + SECRET + behind
    text = form.format(scheme, user, password, rest)
    hidden = "{2}" in form
    try:
        read = dsn.parse(text, source="--dsn", env=_ENVIRONMENT)
    except UsageError as error:
        shown_text = str(error)
        refused(error, "dsn")
    else:
        shown_text = f"{read} {read.warnings}"
        for warning in read.warnings:
            refused(UsageError(warning), "warning", 200)
        hold(SECRET not in repr(read) or not hidden, f"{text!r}: it shows the password: {read!r}")
        hold(read.addresses, "it leads nowhere")
        hold(all(0 < port < 65536 for _, port in read.addresses), f"{read.addresses}")
        hold(read.database and read.user, "it names no database, or no user")
        whole = f"{read!r}{read.password}{read.tls}"
        hold("\0" not in whole, "there is a NUL in it")
        whole.encode()
        read.asyncpg_arguments()
    hold(SECRET not in shown_text or not hidden, f"{text!r}: it shows the password: {shown_text}")


TARGETS = (
    Target(
        name="urls",
        one=urls,
        seeds=(
            b"https://example.com:8443/hook?a=%20b", b"https://[2606:4700::1111]/",
            b"https://8.8.8.8/",
            b"http://10.1.2.3:9000/x", b"https://[::ffff:127.0.0.1]/", b"https://0x7f.1/",
            b"https://127.0.0.1.:443", b"https://[fd00::1]:8443", b"https://a@b/", b"HTTPS://A.b./",
        ),
        words=(
            "https://", "http://", "127.0.0.1", "0x7f", "0177", "2130706433", "localhost", "[::1]",
            "[::ffff:", "%2e", "%00", "@", ":443", ":8443", ":0", "#", "?", "\\", "xn--", "..",
            "0X",
            "169.254.169.254", "metadata", "[fe80::1%25eth0]", "1.1", "0.", "[v1.x]", "\t",
            ".localhost",
        ),
        bytes_max=256,
        runs=1500,
    ),
    Target(
        name="databases",
        one=databases,
        seeds=(
            fields("00app", "", "", "db:5432,b:1/app?sslmode=require&application_name=x"),
            fields("10", "", "", "port=5432 dbname=d options='-c a=b'"),
            fields("20", "it s ", "", "host=/run/postgresql sslmode=verify-full hostaddr=::1"),
            fields("32", "", "", "://db?host=/run&ssl=true&pgbouncer=1"),
            fields("01u", "p%40", "%2F", "[::1]:99/db?connect_timeout=-1&keepalives_idle=3"),
            fields("00app", "1/", "?a=b", "h/db"),
        ),
        words=(
            "@", ":", "/", "?", "#", "%", "%40", "%zz", "%ff", "=", "&", " ", "'", "\\'", "\\",
            "\x00",
            "host=", "password=", "user=", "sslmode=", "service=", "sslrootcert=system", ",",
            "[::1]",
            "postgresql://", "postgres:", "mysql://", "12", "99999", "\n", "dbname=",
            "sslpassword=",
        ),
        bytes_max=300,
        runs=4000,
    ),
)  # fmt: skip
