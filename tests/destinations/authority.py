"""A certificate authority for tests."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from datetime import datetime


class Authority:
    """Signs certificates of servers and clients."""

    def __init__(self, name: str = "test") -> None:
        self._ca = trustme.CA(organization_name=name)
        self.pem = self._ca.cert_pem.bytes().decode()

    def server(self, *names: str, clients: Authority | None = None) -> ssl.SSLContext:
        """Return a server context; with `clients`, it requires their certificates."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._ca.issue_cert(*names).configure_cert(context)
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=clients.pem)
        return context

    def client(self) -> ssl.SSLContext:
        """Return a client context that trusts only this authority."""
        return ssl.create_default_context(cadata=self.pem)

    def identity(
        self, name: str = "relay.example", *, until: datetime | None = None
    ) -> tuple[str, str]:
        """Return a client certificate with its chain, and its private key."""
        made = self._ca.issue_cert(name, not_after=until)
        chain = "".join(each.bytes().decode() for each in made.cert_chain_pems)
        return chain, made.private_key_pem.bytes().decode()
