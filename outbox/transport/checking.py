"""What can be said against an endpoint's settings before anything is sent to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.errors import UsageError
from outbox.transport.egress import parse_networks
from outbox.transport.tls import check_ca

if TYPE_CHECKING:
    from outbox.core.declaration import Declared
    from outbox.core.endpoint import EndpointSettings
    from outbox.transport.egress import EgressPolicy


def check(
    wanted: EndpointSettings, policy: EgressPolicy, there: EndpointSettings | None = None
) -> None:
    """Refuse settings with which nothing could ever be delivered.

    Args:
        there: the settings that it has, which are not looked at again: who changes
            something else need not know which networks are open to the relays.

    Raises:
        UsageError: one line that says what is wrong and what to do.
    """
    goes = (wanted.url, wanted.allow_networks)
    if there is None or goes != (there.url, there.allow_networks):
        policy.check_url(wanted.url, parse_networks(",".join(wanted.allow_networks)))
    if wanted.ca is not None and (there is None or wanted.ca != there.ca):
        check_ca(wanted.ca)


def check_declared(declared: Declared, policy: EgressPolicy) -> None:
    """The same for an endpoint of a file.

    Raises:
        UsageError: the message begins with its place.
    """
    try:
        check(declared.settings, policy)
    except UsageError as error:
        raise UsageError(f"{declared.place}.{error}") from None
