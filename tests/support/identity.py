"""A client certificate of a relay."""

from __future__ import annotations

import trustme


def identity() -> str:
    """Return a new certificate with its key, in PEM."""
    certificate = trustme.CA().issue_cert("relay.example.com")
    chain = (blob.bytes() for blob in certificate.cert_chain_pems)
    return b"".join([*chain, certificate.private_key_pem.bytes()]).decode()
