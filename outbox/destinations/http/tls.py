"""Whom we trust, and who we are: contexts for TLS.

An endpoint may have its own trust store and an identity of ours.  Both texts
are checked when an operator gives them, so that a wrong one is an error of a
command and not a week of failed deliveries.

The private key comes from the database and never lies on a disk in clear:
OpenSSL reads keys from files only, so it gets one that is encrypted under a
password which nobody ever sees.

Nothing turns verification off.  OpenSSL's own variables, SSL_CERT_FILE and
SSL_CERT_DIR, say where the system's trust store is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.core.model.response import one_line
from outbox.destinations.http import pem
from outbox.errors import UsageError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from outbox.destinations.interface import Tls


@dataclass(frozen=True, slots=True)
class Description:
    """A certificate, or the first of several, for people and programs."""

    subject: str
    not_after: datetime
    sha256: str
    """The fingerprint, as `openssl x509 -fingerprint -sha256` writes it."""
    more: int = 0
    """How many others stand behind it."""

    def __str__(self) -> str:
        text = f"{self.subject}, until {self.not_after:%Y-%m-%d}, SHA-256 {self.sha256}"
        return f"{text}, and {self.more} more" if self.more else text


def check_ca(text: str) -> Description:
    """What certificates to trust (PEM) are; described is the one that is good for longest.

    Raises:
        UsageError: they cannot be trusted; one line that says why.
    """
    certificates = pem.authorities(text)
    lasting = max(certificates, key=lambda each: each.not_valid_after_utc)
    _check_dates(lasting, "ca")
    try:
        _context(certificates)
    except ssl.SSLError as error:
        raise UsageError(f"ca: cannot be used: {reason(error)}") from None
    return _described(lasting, len(certificates) - 1)


def check_identity(text: str) -> Description:
    """Whom a certificate, its chain and its private key (PEM) stand for.

    Raises:
        UsageError: they cannot be used; one line that says why, and shows nothing of the key.
    """
    chain, key = pem.identity(text)
    _check_dates(chain[0], "identity")
    try:
        _identify(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), chain, key)
    except ssl.SSLError as error:
        raise UsageError(f"identity: cannot be used: {reason(error)}") from None
    return _described(chain[0], len(chain) - 1)


def system_context() -> ssl.SSLContext:
    """Trusts whom the system trusts."""
    return _strict(ssl.create_default_context())


def context_for(tls: Tls) -> ssl.SSLContext:
    """A context for an endpoint's own trust and identity.

    Both texts are checked again, but for their dates: whoever may write to the
    database need not have come by way of a command.

    Raises:
        UsageError, ssl.SSLError: one of the texts cannot be used.
    """
    # First, because the system's trust store takes longer than to refuse.
    trusted = None if tls.ca is None else pem.authorities(tls.ca)
    who = None if tls.identity is None else pem.identity(tls.identity)
    context = system_context() if trusted is None else _context(trusted)
    if who is not None:
        _identify(context, *who)
    return context


def reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, without where in its source it says so."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()


def _context(trusted: list[Certificate]) -> ssl.SSLContext:
    from cryptography.hazmat.primitives.serialization import Encoding

    # As they were read, and nothing else that OpenSSL might find in the text.
    cadata = b"".join(each.public_bytes(Encoding.DER) for each in trusted)
    context = _strict(ssl.create_default_context(cadata=cadata))
    # Whatever stands there is trusted, an intermediate or a server's own
    # certificate too; Python 3.13 has it so by default.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    # The first three are Python's defaults, said again because they are what
    # everything stands on.
    context.check_hostname = True
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    context.set_alpn_protocols(("http/1.1",))
    return context


def _identify(context: ssl.SSLContext, chain: list[Certificate], key: pem.PrivateKey) -> None:
    """Load an identity, by way of a file with an encrypted key."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
    )

    password = secrets.token_hex(32)
    encrypted = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode())
    )
    descriptor, name = tempfile.mkstemp(prefix="outbox-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(each.public_bytes(Encoding.PEM) for each in chain)
            file.write(encrypted)
        context.load_cert_chain(name, password=password)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def _check_dates(certificate: Certificate, what: str) -> None:
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        raise UsageError(f"{what}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    if certificate.not_valid_before_utc > now:
        raise UsageError(f"{what}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d}")


def _described(certificate: Certificate, more: int) -> Description:
    from cryptography.hazmat.primitives.hashes import SHA256

    return Description(
        subject=one_line(certificate.subject.rfc4514_string() or "(no subject)"),
        not_after=certificate.not_valid_after_utc,
        sha256=certificate.fingerprint(SHA256()).hex(":").upper(),
        more=more,
    )
