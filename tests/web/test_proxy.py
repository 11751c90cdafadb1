"""The proxy URL: what is accepted, and that a password is never shown."""

from __future__ import annotations

import base64

import pytest

from outbox.web.proxy import Proxy, parse_proxy


@pytest.mark.parametrize(
    ("text", "secure", "host", "port"),
    [
        ("http://proxy:4750", False, "proxy", 4750),
        ("http://proxy.internal:3128/", False, "proxy.internal", 3128),
        ("https://[::1]:443", True, "::1", 443),
        (" HTTP://10.0.0.1:80\n", False, "10.0.0.1", 80),
    ],
)
def test_a_proxy_is_a_host_and_a_port(text: str, secure: bool, host: str, port: int) -> None:
    assert parse_proxy(text) == Proxy(secure, host, port)


def test_credentials_are_decoded_and_never_shown() -> None:
    proxy = parse_proxy("http://me:p%40ss%3Aw%C3%B6rd@proxy:1")
    assert proxy.authorization is not None
    scheme, _, sent = proxy.authorization.partition(" ")
    assert (scheme, base64.b64decode(sent).decode()) == ("Basic", "me:p@ss:wörd")
    assert sent not in repr(proxy)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "proxy:4750",
        "socks5://proxy:1",
        "http://",
        "http://proxy",
        "http://me:hunter2@proxy",
        "http://me:hunter2@proxy:x",
        "http://me:hunter2@proxy:99999",
        "http://me:hunter2@proxy:1/path",
        "http://me:hunter2@proxy:1?a=b",
        "http://me:hun ter2@proxy:1",
        "http://me:hunter2@pröxy:1",
        "http://me:hunter2@proxy:1\r\nX: y",
    ],
)
def test_an_invalid_proxy_is_rejected_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match="host") as error:
        parse_proxy(text)
    assert "hunter2" not in str(error.value)
    assert "\n" not in str(error.value)
