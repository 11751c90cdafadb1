"""URLs of brokers: each rule holds for every scheme."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.destinations.brokers import check_broker_url, find_destination
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.plugins import DESTINATIONS, installed
from outbox_brokers import plugins

OPEN = EgressPolicy(["0.0.0.0/0", "::/0"])
OPTION = {
    plugins.REDIS.title: "db=1",
    plugins.NATS.title: "stream=S",
    plugins.RABBITMQ.title: "vhost=v",
    plugins.KAFKA.title: "sasl=plain",
}
PORTS = {
    "redis": 6379,
    "rediss": 6379,
    "valkey": 6379,
    "valkeys": 6379,
    "nats": 4222,
    "nats+tls": 4222,
    "rabbitmq-stream": 5552,
    "rabbitmq-stream+tls": 5551,
    "kafka": 9092,
    "kafka+tls": 9093,
}
DECODES = (plugins.REDIS, plugins.RABBITMQ)
"""Their names may be percent-encoded."""

REFUSED = {
    "option given twice": "h/s?{option}&{option}",
    "unknown option": "h/s?tls=0",
    "option without a value": "h/s?{name}",
    "empty option": "h/s?{name}=",
    "option that is not UTF-8": "h/s?{option}%ff",
    "option with a control character": "h/s?{option}%00",
    "too many options": "h/s?" + "&".join(f"x{n}=1" for n in range(100)),
    "space in the host": "h h/s",
    "space in the name": "h/s s",
    "control character": "h/s\x00",
    "line end": "h/s\n",
    "backslash": "h\\h/s",
    "not ASCII": "h\N{LATIN SMALL LETTER O WITH DIAERESIS}st/s",
    "too long a host": "h" * 1_000_000 + "/s",
    "too long a name": "h/" + "s" * 3000,
    "user": "secret@h/s",
    "password": "user:secret@h/s",
    "password without a user": ":secret@h/s",
    "empty user": "@h/s",
    "fragment": "h/s#f",
    "empty fragment": "h/s#",
    "port 0": "h:0/s",
    "port 65536": "h:65536/s",
    "port of many digits": "h:" + "9" * 1000 + "/s",
    "port that is no number": "h:x/s",
    "signed port": "h:+80/s",
    "empty port": "h:/s",
    "empty host": "/s",
    "port without a host": ":80/s",
    "percent sign in the host": "h%41/s",
    "host with a character of no host": "h*/s",
    "IPv6 literal without its end": "[::1/s",
    "IPv6 literal without brackets": "::1/s",
    "name in brackets": "[h]/s",
    "IPv4 literal in brackets": "[127.0.0.1]/s",
    "IPv6 literal with a zone": "[fe80::1%25eth0]/s",
    "empty host of several": "h,,h/s",
    "no name": "h",
    "no name after the slash": "h/",
    "no name before the options": "h?{option}",
    "name that is not UTF-8": "h/s%ff",
    "name with a control character": "h/s%00",
}
REFUSED_BY_EGRESS = {
    "IPv4 literal of two numbers": "127.1/s",
    "hexadecimal IPv4 literal": "0x7f.1/s",
    "decimal IPv4 literal": "2130706433/s",
    "empty label": "h..h/s",
    "label of 64 characters": "h" * 64 + "/s",
}


def test_every_scheme_has_its_port_here() -> None:
    assert PORTS.keys() == installed(DESTINATIONS).keys()


def with_scheme(scheme: str, rest: str) -> str:
    option = OPTION[find_destination(f"{scheme}://").title]
    return f"{scheme}://{rest.format(option=option, name=option.partition('=')[0])}"


def parse(url: str) -> Any:
    return find_destination(url.partition("://")[0] + "://").parse_url(url)


def cells(*tables: dict[str, str]) -> list[Any]:
    return [
        pytest.param(with_scheme(scheme, rest), id=f"{scheme}-{name}")
        for scheme in ("redis", "nats+tls", "rabbitmq-stream", "kafka+tls")
        for table in tables
        for name, rest in table.items()
    ]


def check_message(error: UsageError) -> None:
    message = str(error)
    assert message.startswith("url: ")
    assert message.isprintable()
    assert len(message) < 300
    assert "secret" not in message


@pytest.mark.parametrize("url", cells(REFUSED))
def test_a_url_that_breaks_a_rule_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(url)
    check_message(refused.value)


@pytest.mark.parametrize("url", cells(REFUSED, REFUSED_BY_EGRESS))
def test_an_endpoint_cannot_have_such_a_url(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_broker_url(url, OPEN, ())
    check_message(refused.value)


@pytest.mark.parametrize("scheme", PORTS)
@pytest.mark.parametrize(
    ("authority", "server"),
    [
        ("h", ("h", None)),
        ("H.Example:7", ("h.example", 7)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]", ("::1", None)),
        ("[2001:DB8::1]:7", ("2001:db8::1", 7)),
        ("a_b.example", ("a_b.example", None)),
    ],
)
def test_a_url_names_a_server(scheme: str, authority: str, server: tuple[str, int | None]) -> None:
    host, port = server
    written = with_scheme(scheme, f"{authority}/s?{{option}}")
    for url in (written, written.replace(scheme, scheme.upper(), 1)):
        target = parse(url)
        assert list(target.servers) == [(host, port or PORTS[scheme])]
        is_secure = scheme.endswith("+tls") or scheme in ("rediss", "valkeys")
        assert target.secure == is_secure
        check_broker_url(url, OPEN, ())


@pytest.mark.parametrize("scheme", PORTS)
def test_only_a_cluster_of_kafka_has_several_servers_in_its_url(scheme: str) -> None:
    url = f"{scheme}://a,[::1]:7/s"
    if scheme.startswith("kafka"):
        assert parse(url).servers == (("a", PORTS[scheme]), ("::1", 7))
        return
    with pytest.raises(UsageError):
        parse(url)


@pytest.mark.parametrize("scheme", PORTS)
def test_a_name_may_be_percent_encoded_if_it_may_have_such_characters(scheme: str) -> None:
    url = f"{scheme}://h/a%41%C3%B6"
    if find_destination(f"{scheme}://") in DECODES:
        assert parse(url).stream == "aA\N{LATIN SMALL LETTER O WITH DIAERESIS}"
        return
    with pytest.raises(UsageError):
        parse(url)
