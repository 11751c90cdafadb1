"""Where an endpoint's broker is, and how to reach it."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from outbox.core.brokers.message import CREDENTIALS_HEADER
from outbox.core.model.destination import is_stream
from outbox.destinations.broker import BrokerAddress
from outbox.errors import UsageError
from outbox.network.tls import Tls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.delivery.endpoint import Endpoint

BROKER_TIMEOUT_S_MAX = 60.0
"""Longest time-out of a call to a broker, and so the time for which its server can hold one."""
CREDENTIALS_FORMS = (
    '"Authorization: Basic <base64 of user:password>", "Authorization: Bearer <token>" or '
    '"Authorization: Creds <base64 of a file of credentials>"'
)


def broker_address(endpoint: Endpoint) -> BrokerAddress | None:
    """The address of an endpoint's broker; None: its destination is an HTTP receiver."""
    if not is_stream(endpoint.url):
        return None
    credentials, problem = None, None
    try:
        credentials = find_credentials(endpoint.headers.own)
    except UsageError as error:
        problem = str(error)
    return BrokerAddress(
        endpoint.url,
        credentials,
        # Endpoints of earlier versions may have longer ones.
        min(endpoint.connect_timeout_s, BROKER_TIMEOUT_S_MAX),
        min(endpoint.timeout_s, BROKER_TIMEOUT_S_MAX),
        endpoint.networks,
        Tls(endpoint.ca, endpoint.identity) if endpoint.ca or endpoint.identity else None,
        problem,
        of_tenant=endpoint.tenant is not None,
    )


def find_credentials(headers: Iterable[tuple[str, str]]) -> str | None:
    """The credentials among an endpoint's own headers; None: there are none.

    Raises:
        UsageError: as for `credentials_of`.
    """
    values = (value for name, value in headers if name.lower() == CREDENTIALS_HEADER)
    value = next(values, None)
    return None if value is None else credentials_of(value)


def credentials_of(value: str) -> str:
    """The credentials in the value of the header Authorization (RFC 7617, RFC 6750).

    Returns:
        `user:password`, a token, or the content of a file of credentials.

    Raises:
        UsageError: it has neither form; the value is not quoted.
    """
    scheme, _, rest = value.strip().partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    if scheme.lower() in ("basic", "creds"):
        try:
            text = b64decode(rest.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            text = ""
        if ":" in text or (text and scheme.lower() == "creds"):
            return text
    raise UsageError(f"headers: the credentials of a broker are {CREDENTIALS_FORMS}")


def credentials_header(text: str, name: str = "FILE") -> str:
    """The value of the header Authorization for credentials; `credentials_of` reads it.

    Args:
        text: `user:password`, a token, or the content of a file of credentials, which has several
            lines.
        name: the name of the field or argument, for the error message.

    Raises:
        UsageError: the text is empty, or has control characters.
    """
    if not text or not all(line.isprintable() for line in text.splitlines()):
        raise UsageError(f"{name}: must be user:password, a token, or a file of credentials")
    if len(text.splitlines()) > 1:
        return f"Creds {b64encode(text.encode()).decode()}"
    if ":" in text:
        return f"Basic {b64encode(text.encode()).decode()}"
    return f"Bearer {text}"
