from __future__ import annotations

import contextlib
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import UsageError
from outbox.network.egress import SETTING, EgressPolicy, parse_networks
from tests.destinations.hostile import ADDRESSES, URLS

CLOSED = EgressPolicy()
OPEN = EgressPolicy(["127.0.0.0/8", "::1", "10.1.0.0/16"])

OUTSIDE = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"]


@pytest.mark.parametrize("address", OUTSIDE)
def test_public_addresses_allow_only_https_on_its_ports(address: str) -> None:
    assert CLOSED.refusal(address, port=443, tls=True) is None
    assert CLOSED.refusal(address, port=8443, tls=True) is None
    assert "port 22" in str(CLOSED.refusal(address, port=22, tls=True))
    assert "http" in str(CLOSED.refusal(address, port=443, tls=False))


def test_opened_networks_allow_plain_http_and_any_port() -> None:
    for address in ("127.0.0.1", "::1", "10.1.2.3", "::ffff:127.0.0.1", "::ffff:10.1.2.3"):
        assert OPEN.refusal(address, port=9000, tls=False) is None
    for address in ("10.2.0.1", "::2", "192.168.0.1", "::ffff:10.2.0.1", "64:ff9b::7f00:1"):
        assert OPEN.refusal(address, port=443, tls=True) is not None
    assert OPEN.refusal("8.8.8.8", port=80, tls=False) is not None


def test_even_the_whole_internet_can_be_opened() -> None:
    everything = EgressPolicy(["0.0.0.0/0", "::/0"])
    for address in (*ADDRESSES, *OUTSIDE):
        assert everything.refusal(address, port=1, tls=False) is None


@given(st.ip_addresses(v=4))
def test_non_global_addresses_are_refused_also_embedded_in_ipv6(address: object) -> None:
    v4 = ip_address(str(address))
    refused = CLOSED.refusal(v4, port=443, tls=True)
    if not v4.is_global or v4.is_multicast:
        assert refused is not None
    mapped = CLOSED.refusal(f"::ffff:{v4}", port=443, tls=True)
    assert (mapped is None) == (refused is None)


@given(st.ip_addresses(v=6))
def test_addresses_that_python_calls_not_global_are_never_allowed(address: object) -> None:
    v6 = ip_address(str(address))
    if CLOSED.refusal(v6, port=443, tls=True) is None:
        assert v6.is_global
        assert v6 in ip_network("2000::/3") or v6 in ip_network("::ffff:0:0/96")


# ---------------------------------------------------------------------- URLs


@pytest.mark.parametrize("url", URLS)
def test_hostile_urls_are_refused_with_a_one_line_reason(url: str) -> None:
    with pytest.raises(UsageError, match="url: ") as error:
        CLOSED.check_url(url)
    assert "\n" not in str(error.value)
    assert CLOSED.refusal_of_url(url)


@pytest.mark.parametrize("address", ADDRESSES)
def test_hostile_addresses_are_refused_regardless_of_the_resolver(address: str) -> None:
    for networks in ((), (ip_network("10.77.0.0/16"),)):
        reason = CLOSED.refusal(address, port=443, tls=True, networks=networks)
        assert reason is not None
        assert SETTING in reason
        assert "\n" not in reason


def test_networks_of_an_endpoint_add_to_the_relays() -> None:
    own = (ip_network("192.168.7.0/24"),)
    for url in ("http://192.168.7.1:9000/", "http://10.1.0.1:9000/", "http://inside.example:9000/"):
        OPEN.check_url(url, own)
    CLOSED.check_url("http://192.168.7.1:9000/", own)
    assert CLOSED.refusal("192.168.7.1", port=9000, tls=False, networks=own) is None
    assert CLOSED.refusal("::ffff:192.168.7.1", port=9000, tls=False, networks=own) is None
    assert CLOSED.refusal("192.168.8.1", port=9000, tls=False, networks=own)
    with pytest.raises(UsageError, match=SETTING):
        CLOSED.check_url("http://192.168.7.1:9000/")


def test_external_destinations_use_the_proxy() -> None:
    own = (ip_network("192.168.7.0/24"),)
    for host in ("example.com", "8.8.8.8", "192.168.8.1", "2606:4700::1111"):
        assert OPEN.uses_proxy(host, tls=True, networks=own)
        assert not OPEN.uses_proxy(host, tls=False, networks=own)
    for host in ("127.0.0.1", "10.1.2.3", "192.168.7.7", "localhost", "x.localhost."):
        assert not OPEN.uses_proxy(host, tls=True, networks=own)


def test_names_use_only_https_ports_with_a_proxy() -> None:
    own = (ip_network("192.168.7.0/24"),)
    proxied = EgressPolicy(proxied=True)
    for url in (
        "https://inside.example:8443/",
        "https://192.168.7.1:9443/",
        "https://localhost:9443/",
        "http://inside.example:9000/",
    ):
        proxied.check_url(url, own)
    with pytest.raises(UsageError, match="port 9443: https to a host name uses the proxy"):
        proxied.check_url("https://inside.example:9443/", own)
    CLOSED.check_url("https://inside.example:9443/", own)


def test_a_denied_network_is_suggested_for_one_endpoint_first() -> None:
    for url in (
        "https://10.0.0.5/",
        "https://localhost/",
        "http://x.example/",
        "https://x.example:1/",
    ):
        reason = CLOSED.refusal_of_url(url) or ""
        assert reason.endswith(
            "with --allow-network (for this endpoint alone) or OUTBOX_ALLOW_NETWORKS (for all)"
        ), url


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://example.com/",
        "https://example.com:443/hook?a=b&c=%20d",
        "https://example.com:8443/",
        "https://EXAMPLE.com./hook",
        "HTTPS://example.com/",
        "https://xn--bcher-kva.example/",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]/",
        "https://example.com/a@b",
        "https://example.com?user@host",
    ],
)
def test_valid_urls_are_accepted(url: str) -> None:
    CLOSED.check_url(url)
    OPEN.check_url(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "ASCII"),
        ("example.com", "https://"),
        ("//example.com/", "https://"),
        ("ftp://example.com/", "https://"),
        ("file:///etc/passwd", "https://"),
        ("javascript:alert(1)", "https://"),
        ("https:", "host"),
        ("https://", "host"),
        ("https:///path", "host"),
        ("https://:443/", "host"),
        ("https://user@example.com/", "user"),
        ("https://user:pw@example.com/", "user"),
        ("https://@example.com/", "user"),
        ("https://:@example.com/", "user"),
        ("https://example.com@10.0.0.1/", "user"),
        ("https://[2606:4700::1111]:8443@", "user"),
        ("https://example.com#x", "fragment"),
        ("https://example.com/#", "fragment"),
        ("https://exa mple.com/", "ASCII"),
        ("https://example.com/\r\nHost: evil", "ASCII"),
        ("https://example.com\\@10.0.0.1/", "backslash"),
        ("https://bücher.example/", "xn--"),
        ("https://①②⑦.0.0.1/", "ASCII"),
        ("https://example.com:0/", "port"),
        ("https://example.com:99999/", "malformed"),
        ("https://example.com:x/", "malformed"),
        ("https://exa[mple/", "malformed"),
        ("https://127%2e0.0.1/", "%"),
        ("https://[fe80::1%25eth0]/", "%"),
        ("https://127.1/", "decimal"),
        ("https://2130706433/", "decimal"),
        ("https://0x7f000001/", "decimal"),
        ("https://0x7f.1/", "decimal"),
        ("https://0177.0.0.1/", "decimal"),
        ("https://127.0.0.1./", "decimal"),
        ("https://1.2.3.4.5/", "decimal"),
        ("https://example..com/", "at most 63 characters"),
        ("https://example.com../", "at most 63 characters"),
        ("https://.example.com/", "at most 63 characters"),
        ("https://a$b.example/", "letters, digits and hyphens"),
        ("https://" + "a" * 64 + ".example/", "at most 63 characters"),
        ("https://" + "a." * 127 + "example/", "is not a host"),
        ("https://" + "a" * 2048 + ".example/", "longer"),
    ],
)
def test_invalid_urls_are_refused_with_any_networks(url: str, says: str) -> None:
    for policy in (CLOSED, OPEN, EgressPolicy(["0.0.0.0/0", "::/0"])):
        with pytest.raises(UsageError, match=says) as error:
            policy.check_url(url)
        assert str(error.value).startswith("url: ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "http://localhost:9000/",
        "https://localhost/",
        "https://x.localhost/",
        "https://LOCALHOST./",
        "https://127.0.0.1/",
        "http://127.0.0.1:9000/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://example.com:9000/",
    ],
)
def test_urls_that_need_an_opened_network_name_the_option(url: str) -> None:
    with pytest.raises(UsageError, match=SETTING):
        CLOSED.check_url(url)
    OPEN.check_url(url)


def test_only_opened_networks_are_allowed() -> None:
    for url in ("http://10.2.0.1/", "http://8.8.8.8/", "https://192.168.1.1/", "http://[::2]/"):
        with pytest.raises(UsageError, match=SETTING):
            OPEN.check_url(url)


@given(st.text(st.characters(max_codepoint=0x180), max_size=40))
def test_any_url_raises_only_the_expected_error(text: str) -> None:
    for url in (text, f"https://{text}", f"http://127.0.0.1{text}"):
        for policy in (CLOSED, OPEN):
            with contextlib.suppress(UsageError):
                policy.check_url(url)


# ------------------------------------------------------------------- settings


def test_networks_are_parsed() -> None:
    parsed = parse_networks(" 10.0.0.0/8, ::1 ,,192.168.1.7 ")
    assert list(map(str, parsed)) == ["10.0.0.0/8", "::1/128", "192.168.1.7/32"]
    assert parse_networks("") == ()


@pytest.mark.parametrize("text", ["x", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0-10.0.0.9", "::1/8"])
def test_an_invalid_network_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match=SETTING):
        parse_networks(text)
    with pytest.raises(UsageError, match=SETTING):
        EgressPolicy([text])
