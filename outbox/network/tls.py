"""TLS contexts: trust stores and client certificates.

An endpoint may have its own CA certificates and a client certificate.  Both are validated
when they are configured, so that a mistake is an immediate error and not a series of failed
deliveries.

The private key comes from the database and is never written to disk in clear: OpenSSL loads
keys from files only, so the file is in memory, and encrypted with a random password, too.

Verification cannot be disabled.  SSL_CERT_FILE and SSL_CERT_DIR select the system trust store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
import sys
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outbox.core.model.response import one_line
from outbox.errors import UsageError
from outbox.network import pem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.x509 import Certificate


SESSIONS_MAX = 1024
"""Maximum number of servers whose TLS sessions a context keeps."""
SESSION_AGE_S_MAX = 600.0
"""Seconds after a full handshake in which its session is resumed."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of an endpoint, validated by `check_ca` and `check_identity`.

    There is deliberately no option to disable verification.
    """

    ca: str | None = None
    """CA certificates (PEM), instead of the system trust store."""
    identity: str | None = field(default=None, repr=False)
    """Client certificate, chain and private key (PEM) for mutual TLS."""


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """Summary of a certificate, or of the first of several."""

    subject: str
    not_after: datetime
    sha256: str
    """Fingerprint in the format of `openssl x509 -fingerprint -sha256`."""
    more: int = 0
    """Number of further certificates."""

    def __str__(self) -> str:
        text = f"{self.subject}, until {self.not_after:%Y-%m-%d}, SHA-256 {self.sha256}"
        return f"{text}, and {self.more} more" if self.more else text


def check_ca(text: str) -> CertificateInfo:
    """Validate CA certificates (PEM); returns a summary of the one that expires last.

    Raises:
        UsageError: the certificates cannot be used.
    """
    certificates = pem.parse_authorities(text)
    latest = max(certificates, key=lambda each: each.not_valid_after_utc)
    _check_dates(latest, "ca")
    try:
        _ca_context(certificates)
    except ssl.SSLError as error:
        raise UsageError(f"ca: not usable: {ssl_error_reason(error)}") from None
    return _summarize(latest, len(certificates) - 1)


def check_identity(text: str) -> CertificateInfo:
    """Validate a client certificate, its chain and its private key (PEM).

    Raises:
        UsageError: they cannot be used; the message contains nothing of the key.
    """
    chain, key = pem.parse_identity(text)
    _check_dates(chain[0], "identity")
    try:
        _load_identity(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), chain, key)
    except ssl.SSLError as error:
        raise UsageError(f"identity: not usable: {ssl_error_reason(error)}") from None
    return _summarize(chain[0], len(chain) - 1)


def system_context() -> ssl.SSLContext:
    """Create a context with the system trust store."""
    return _strict(None)


def endpoint_context(tls: Tls) -> ssl.SSLContext:
    """Create a context for an endpoint's CA certificates and client certificate.

    Both texts are validated again, except for their dates, because rows may be written to the
    database without the API.

    Raises:
        UsageError, ssl.SSLError: a text is not usable.
    """
    # Validate first: loading the system trust store is slower.
    trusted = None if tls.ca is None else pem.parse_authorities(tls.ca)
    client = None if tls.identity is None else pem.parse_identity(tls.identity)
    context = system_context() if trusted is None else _ca_context(trusted)
    if client is not None:
        _load_identity(context, *client)
    return context


# What OpenSSL calls the first bytes of a plain-text response.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG")


def ssl_error_reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's message without its source location."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if error.reason in _NOT_TLS:
        return "plain text instead of TLS (is it http://?)"
    return (error.reason or str(error)).replace("_", " ").lower()


def _ca_context(trusted: list[Certificate]) -> ssl.SSLContext:
    from cryptography.hazmat.primitives.serialization import Encoding

    # DER of the parsed certificates only, so that OpenSSL sees nothing else of the text.
    cadata = b"".join(each.public_bytes(Encoding.DER) for each in trusted)
    context = _strict(cadata)
    # Trust intermediates and server certificates as anchors as well; the default since
    # Python 3.13.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class ResumingContext(ssl.SSLContext):
    """A context that resumes the session of the last connection to a server (RFC 8446, 2.2).

    An endpoint with an event every minute saves a full handshake each time.
    """

    def __init__(self, *_: object) -> None:
        super().__init__()
        # By server name, the least recently used first; and when its certificate was verified.
        self._sessions: OrderedDict[str, tuple[ssl.SSLSession, float]] = OrderedDict()
        self._offered: WeakKeyDictionary[ssl.SSLObject, float] = WeakKeyDictionary()

    def remember(self, connection: ssl.SSLObject) -> None:
        """Keep the session of a connection, after its first response: tickets come with it."""
        name, session = connection.server_hostname, connection.session
        if name is not None and session is not None:
            at = self._offered.get(connection) if connection.session_reused else None
            self._sessions[name] = session, time.monotonic() if at is None else at
            self._sessions.move_to_end(name)
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        # Each is offered once: with a server that fails on it, a full handshake follows.
        found = self._sessions.pop(str(server_hostname), None)
        # The certificate is verified by a full handshake only.
        if found is None or found[1] + SESSION_AGE_S_MAX < time.monotonic():
            return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        session, at = found
        connection = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        self._offered[connection] = at
        return connection


def _strict(cadata: bytes | None) -> ssl.SSLContext:
    """Create a context with CA certificates (DER); None: the system trust store."""
    context = ResumingContext(ssl.PROTOCOL_TLS_CLIENT)
    if cadata is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        context.load_verify_locations(cadata=cadata)
    if sys.version_info >= (3, 13):  # As in its default context.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    # Explicit, although these are Python's defaults: security depends on them.
    context.check_hostname = True
    context.verify_mode = ssl.CERT_REQUIRED
    # A certificate's names are its subjectAltName alone (RFC 9525, 2).
    context.hostname_checks_common_name = False
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    context.set_alpn_protocols(("http/1.1",))
    return context


def _load_identity(context: ssl.SSLContext, chain: list[Certificate], key: pem.PrivateKey) -> None:
    """Load a client certificate from a file with an encrypted key, in memory if possible."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
    )

    password = secrets.token_hex(32)
    encrypted = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode())
    )
    content = b"".join((*(each.public_bytes(Encoding.PEM) for each in chain), encrypted))
    with _secret_file(content) as name:
        context.load_cert_chain(name, password=password)


@contextlib.contextmanager
def _secret_file(content: bytes) -> Iterator[str]:
    """A file for this process; in memory on Linux, where the file system may be read-only."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("outbox"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile(prefix="outbox-", suffix=".pem") as file:
        file.write(content)
        file.flush()
        yield file.name


def _check_dates(certificate: Certificate, what: str) -> None:
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        raise UsageError(f"{what}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    if certificate.not_valid_before_utc > now:
        raise UsageError(f"{what}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d}")


def _summarize(certificate: Certificate, more: int) -> CertificateInfo:
    from cryptography.hazmat.primitives.hashes import SHA256

    return CertificateInfo(
        subject=one_line(certificate.subject.rfc4514_string() or "(no subject)"),
        not_after=certificate.not_valid_after_utc,
        sha256=certificate.fingerprint(SHA256()).hex(":").upper(),
        more=more,
    )
