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
        "169.254.170.2",
        "169.254.170.23",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "64:ff9b::a9fe:a9fe",
    )
)
"""Of AWS, Google and most others; containers on AWS; Azure's agent; Alibaba's; Oracle's; AWS and
Google by IPv6; and the first one behind NAT64."""


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
