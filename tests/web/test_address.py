"""Listen addresses of servers, and keys of their clients."""

from __future__ import annotations

import pytest

from outbox.web.address import Address, address_key, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", Address("127.0.0.1", 8080)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:80", Address("::1", 80)),
        (":9000", Address("0.0.0.0", 9000)),  # noqa: S104 (who writes :9000 means it)
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["8080", "127.0.0.1", "localhost:http", "::1:80", "", "a:-1"])
def test_an_invalid_address_error_gives_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT, such as 127\.0\.0\.1:8080"):
        parse_address(text)


def test_a_port_above_the_maximum_is_rejected() -> None:
    with pytest.raises(ValueError, match="a port is at most 65535"):
        parse_address("localhost:65536")


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("unknown", "unknown"),
        ("", ""),
    ],
)
def test_an_ipv6_network_has_one_key(address: str, key: str) -> None:
    assert address_key(address) == key
