"""Cloud metadata services: their addresses, and warnings for networks that include them.

If such a network is allowed, an endpoint's URL can reach the machine's credentials.  It is not
rejected, because the machine may have no metadata service.
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
"""AWS, Google and most others; containers on AWS (two); Azure's agent; Alibaba; Oracle; AWS (two)
and Google over IPv6; and the first one behind NAT64."""


def exposed_metadata_warnings(networks: Iterable[str | IPv4Network | IPv6Network]) -> list[str]:
    """A warning for each network that includes a metadata service."""
    warnings = []
    for each in networks:
        network = ip_network(each) if isinstance(each, str) else each
        metadata_address = next((address for address in ADDRESSES if address in network), None)
        if metadata_address is not None:
            warnings.append(
                f"{network} includes {metadata_address}, "
                "where clouds provide a machine's credentials"
            )
    return warnings


def network_warnings(
    setting: str, networks: Iterable[str | IPv4Network | IPv6Network]
) -> list[str]:
    """The warnings about the networks of a setting, with what to do."""
    reasons = exposed_metadata_warnings(networks)
    return [f"{setting}: {reason}; open narrower ranges" for reason in reasons]
