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

import asyncio
import contextlib
import os
import re
import secrets
import ssl
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.core.answer import one_line
from outbox.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.x509 import Certificate

    from outbox.transport.port import Tls

PEM_CHARS_MAX = 64 * 1024
CONTEXTS_MAX = 128
"""So many endpoints' contexts are kept.  One on the system's trust store takes most of a
megabyte, and some hundredths of a second to make."""

_KEY = re.compile(r"-----BEGIN ([A-Z0-9 ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)


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
    if _KEY.search(text):
        raise UsageError("ca: holds a private key; give certificates alone")
    certificates = _certificates(text, "ca")
    lasting = max(certificates, key=lambda each: each.not_valid_after_utc)
    _check_dates(lasting, "ca")
    try:
        _context(text)
    except ssl.SSLError as error:
        raise UsageError(f"ca: cannot be used: {reason(error)}") from None
    return _described(lasting, len(certificates) - 1)


def check_identity(pem: str) -> Description:
    """Whom a certificate, its chain and its private key (PEM) stand for.

    Raises:
        UsageError: they cannot be used; one line that says why, and shows nothing of the key.
    """
    chain, _ = _identity(pem)
    _check_dates(chain[0], "identity")
    try:
        _identify(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem)
    except ssl.SSLError as error:
        raise UsageError(f"identity: cannot be used: {reason(error)}") from None
    return _described(chain[0], len(chain) - 1)


def system_context() -> ssl.SSLContext:
    """Trusts whom the system trusts."""
    return _strict(ssl.create_default_context())


def context_for(tls: Tls) -> ssl.SSLContext:
    """A context for an endpoint's own trust and identity.

    Raises:
        UsageError, ssl.SSLError: one of the texts cannot be used.
    """
    context = system_context() if tls.ca is None else _context(tls.ca)
    if tls.identity is not None:
        _identify(context, tls.identity)
    return context


class Contexts:
    """The contexts of a transport, made once.

    Args:
        system: for whoever has nothing of its own; None: what the system trusts.
    """

    def __init__(self, system: ssl.SSLContext | None = None) -> None:
        self._system = system or system_context()
        self._own: OrderedDict[Tls, ssl.SSLContext] = OrderedDict()

    async def get(self, tls: Tls | None) -> ssl.SSLContext:
        """The context for an endpoint.

        Raises:
            UsageError, ssl.SSLError: it cannot be made.
        """
        if tls is None:
            return self._system
        context = self._own.get(tls)
        if context is None:
            # In a thread: reading the system's trust store takes its time.
            context = await asyncio.to_thread(context_for, tls)
        self._own[tls] = context
        self._own.move_to_end(tls)
        if len(self._own) > CONTEXTS_MAX:
            self._own.popitem(last=False)
        return context


def reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, without where in its source it says so."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()


def _context(ca: str) -> ssl.SSLContext:
    context = _strict(ssl.create_default_context(cadata=ca))
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


def _identify(context: ssl.SSLContext, pem: str) -> None:
    """Load an identity, by way of a file with an encrypted key."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
    )

    chain, key = _identity(pem)
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


def _identity(pem: str) -> tuple[list[Certificate], PrivateKeyTypes]:
    """The chain, beginning with the key's own certificate, and the key.

    Raises:
        UsageError: it is not a certificate with its key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain = _certificates(pem, "identity")
    keys = [found[0] for found in _KEY.finditer(pem)]
    if len(keys) != 1:
        raise UsageError(
            f"identity: holds {len(keys) or 'no'} private keys; it must hold a certificate, its "
            "chain if it has one, and the certificate's private key"
        )
    try:
        key = load_pem_private_key(keys[0].encode(), None)
    except TypeError:
        raise UsageError(
            "identity: the private key is encrypted; decrypt it first, with openssl pkey"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        # Without the library's words, which may quote what it could not read.
        raise UsageError("identity: the private key cannot be read") from None
    try:
        fits = chain[0].public_key() == key.public_key()
    except UnsupportedAlgorithm:
        fits = False
    if not fits:
        raise UsageError("identity: the private key is not the first certificate's")
    return chain, key


def _certificates(text: str, what: str) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    if len(text) > PEM_CHARS_MAX:
        raise UsageError(f"{what}: longer than {PEM_CHARS_MAX} characters")
    try:
        return load_pem_x509_certificates(text.encode())
    except ValueError:
        raise UsageError(
            f"{what}: holds no certificate that can be read; it must be PEM: "
            "-----BEGIN CERTIFICATE-----…"
        ) from None


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
