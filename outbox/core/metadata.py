"""Where clouds tell a machine its credentials, and which open networks lead there.

Who opens such a network has receivers' URLs lead to what gives away the machine itself.
It is not refused: somebody may have nothing there, and has everything open.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ADDRESSES = tuple(
    ip_address(text)
    for text in (
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "fd00:ec2::254",
        "fd20:ce::254",
    )
)
"""Of AWS, Google and most others; Azure's agent; Alibaba's; AWS and Google by IPv6."""


def exposing(networks: Iterable[str | IPv4Network | IPv6Network]) -> list[str]:
    """What of these networks opens a metadata service, in one sentence for each."""
    told = []
    for each in networks:
        network = ip_network(each) if isinstance(each, str) else each
        within = next((address for address in ADDRESSES if address in network), None)
        if within is not None:
            told.append(
                f"{network} has {within} in it, where clouds hand out a machine's credentials"
            )
    return told
