"""TLS trust and client certificates: errors are reported immediately, and verification stays on."""

from __future__ import annotations

import asyncio
import inspect
import os
import ssl
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

import outbox
from outbox.config import Settings
from outbox.core.model.response import Failure
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.errors import UsageError
from outbox.network import tls, tls_contexts
from outbox.network.tls import Tls, check_ca, check_identity, endpoint_context, system_context
from outbox.network.tls_contexts import ContextCache
from tests.destinations.authority import Authority
from tests.destinations.conformance import LOOPBACK, closing, to
from tests.destinations.servers import OK, Connection, respond_with, serving

if TYPE_CHECKING:
    from collections.abc import Callable

GARBAGE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority("us")


@pytest.fixture(scope="session")
def identity(authority: Authority) -> tuple[str, str]:
    return authority.identity()


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> str:
    protection = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection).decode()


# ------------------------------------------------------------------ descriptions


def test_an_identity_is_described_without_its_key(identity: tuple[str, str]) -> None:
    chain, key = identity
    described = check_identity(chain + key)
    assert "CN=" in str(described) or "O=" in str(described)
    assert described.sha256 == _openssl_fingerprint(chain)
    assert f"{described.not_after:%Y-%m-%d}" in str(described)
    assert "\n" not in str(described)
    assert key.split("\n")[1] not in str(described) + repr(described)
    # In either order: the key may come before its certificate.
    assert check_identity(key + chain) == described


def test_the_ca_that_expires_last_is_described(authority: Authority) -> None:
    alone = check_ca(authority.pem)
    assert (alone.more, alone.sha256) == (0, _openssl_fingerprint(authority.pem))
    assert str(check_ca(authority.pem + Authority("b").pem)).endswith("and 1 more")


def _openssl_fingerprint(text: str) -> str:
    from hashlib import sha256

    first = text[: text.index("-----END CERTIFICATE-----") + 26]
    digest = sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest().upper()
    return ":".join(digest[n : n + 2] for n in range(0, 64, 2))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda chain, key: "", "no valid certificate"),
        (lambda chain, key: "nonsense", "no valid certificate"),
        (lambda chain, key: GARBAGE + key, "no valid certificate"),
        (lambda chain, key: key, "no valid certificate"),
        (lambda chain, key: chain, "contains no private keys"),
        (lambda chain, key: chain + key + key, "contains 2 private keys"),
        (
            lambda chain, key: chain + pem(ec.generate_private_key(ec.SECP256R1())),
            "does not match the first certificate",
        ),
        (
            lambda chain, key: chain + pem(load_pem_private_key(key.encode(), None), b"hunter2"),  # type: ignore[arg-type]
            "the private key is malformed or encrypted, .*openssl pkey",
        ),
        (
            lambda chain, key: (
                chain + "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"
            ),
            "the private key is malformed",
        ),
        (lambda chain, key: chain + key + "x" * 70_000, "longer than"),
    ],
)
def test_an_unusable_identity_is_rejected_with_a_one_line_error(
    identity: tuple[str, str], spoil: Callable[[str, str], str], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as error:
        check_identity(spoil(*identity))
    assert str(error.value).startswith("identity: ")
    assert "\n" not in str(error.value)
    assert identity[1].split("\n")[1] not in str(error.value)


def test_an_expired_identity_is_refused(authority: Authority) -> None:
    chain, key = authority.identity(until=datetime.now(UTC) - timedelta(days=1))
    with pytest.raises(UsageError, match="identity: expired on "):
        check_identity(chain + key)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no valid certificate"),
        (GARBAGE, "no valid certificate"),
        ("x" * 70_000, "longer than"),
    ],
)
def test_an_invalid_ca_is_rejected(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"ca: .*{says}"):
        check_ca(text)


def test_a_private_key_is_rejected_where_it_would_be_displayed(
    authority: Authority, identity: tuple[str, str]
) -> None:
    with pytest.raises(UsageError, match="ca: contains a private key"):
        check_ca(authority.pem + identity[1])


# ---------------------------------------------------------------------- secrecy


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_private_key_is_never_on_disk_unencrypted(
    identity: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_memory: bool
) -> None:
    """In memory it needs no directory: the file system of a container may be read-only."""
    chain, key = identity
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none" if in_memory else tmp_path))
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    seen: list[str] = []
    load = ssl.SSLContext.load_cert_chain

    def spy(self: ssl.SSLContext, name: str, *args: object, **options: object) -> None:
        file = Path(name)
        assert in_memory or file.stat().st_mode & 0o777 == 0o600
        seen.append(file.read_text())
        load(self, name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    endpoint_context(Tls(identity=chain + key))
    (written,) = seen
    assert "-----BEGIN ENCRYPTED PRIVATE KEY-----" in written
    for line in key.split("\n")[1:-2]:
        assert line not in written
    assert list(tmp_path.iterdir()) == []


def test_a_private_key_is_never_displayed(identity: tuple[str, str]) -> None:
    own = Tls(ca="ca", identity="".join(identity))
    request = Request(Recipient("https://example.com/", tls=own), "", b"")
    secret = identity[1].split("\n")[1]
    for text in (repr(own), str(own), repr(request), f"{request!r:.99999}"):
        assert secret not in text
    assert {own: 1}[Tls(ca="ca", identity="".join(identity))] == 1


# --------------------------------------------------------- verification is always on


def test_every_context_verifies(authority: Authority, identity: tuple[str, str]) -> None:
    for context in (
        system_context(),
        endpoint_context(Tls()),
        endpoint_context(Tls(ca=authority.pem)),
        endpoint_context(Tls(ca=authority.pem, identity="".join(identity))),
    ):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_verification_cannot_be_disabled() -> None:
    """No setting and no code path accepts any certificate."""
    assert not [name for name in Settings.model_fields if "verify" in name or "insecure" in name]
    source = "".join(
        file.read_text() for file in Path(inspect.getfile(outbox)).parent.rglob("*.py")
    )
    for switch in ("CERT_NONE", "CERT_OPTIONAL", "_create_unverified", "check_hostname = False"):
        assert switch not in source


@pytest.mark.system
async def test_openssl_variables_change_the_cas_but_do_not_disable_verification(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trusted, other = tmp_path / "ca.pem", tmp_path / "other.pem"
    trusted.write_text(authority.pem)
    other.write_text(Authority("other").pem)
    empty = tmp_path / "empty"
    empty.mkdir()
    async with serving(respond_with(OK), authority.server("127.0.0.1")) as server:
        for file, expected in ((trusted, 200), (other, None), (empty / "missing.pem", None)):
            monkeypatch.setenv("SSL_CERT_FILE", str(file))
            monkeypatch.setenv("SSL_CERT_DIR", str(empty))
            for name in ("PYTHONHTTPSVERIFY", "SSL_NO_VERIFY", "NODE_TLS_REJECT_UNAUTHORIZED"):
                monkeypatch.setenv(name, "0")
            async with closing(HttpTransport(LOOPBACK)) as transport:
                response = await transport.send(to(server))
            assert response.status == expected
            assert response.failure is (None if expected else Failure.TLS)


@pytest.mark.system
async def test_a_server_certificate_can_be_pinned(authority: Authority) -> None:
    """A pinned server certificate needs no CA."""
    context = authority.server("127.0.0.1")
    async with serving(respond_with(OK), context) as server:
        leaf = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))
        async with closing(HttpTransport(LOOPBACK)) as ours:
            assert (await ours.send(to(server, tls=Tls(ca=leaf)))).status == 200
            assert (await ours.send(to(server, tls=Tls()))).failure is Failure.TLS


# -------------------------------------------------------------------------- cache


async def test_cached_contexts_are_bounded(
    authority: Authority, identity: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_contexts, "OWN_MAX", 2)
    kept = ContextCache(system_max=1)
    known = Tls(identity="".join(identity))
    ours = await kept.get(known)
    first = Tls(ca=authority.pem)
    made = await kept.get(first)
    assert await kept.get(Tls(ca=authority.pem)) is made
    for name in ("a", "b"):
        await kept.get(Tls(ca=Authority(name).pem))
    assert await kept.get(first) is not made
    # Contexts with a custom CA evict only each other, not the others, which cost more to build.
    assert await kept.get(known) is ours
    await kept.get(Tls(identity="".join(authority.identity())))
    assert await kept.get(known) is not ours
    assert await kept.get(None) is await kept.get(None)


async def test_concurrent_callers_share_one_context(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tls] = []
    release = threading.Event()

    def slowly(own: Tls) -> ssl.SSLContext:
        asked.append(own)
        release.wait(20)
        if len(asked) == 1:
            raise UsageError("ca: cannot be used")
        return endpoint_context(own)

    monkeypatch.setattr(tls_contexts, "endpoint_context", slowly)
    kept = ContextCache()
    own = Tls(ca=authority.pem)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await kept.get(own)
    lanes = [asyncio.ensure_future(kept.get(own)) for _ in range(64)]
    await asyncio.sleep(0)
    release.set()
    refused = await asyncio.gather(*lanes, return_exceptions=True)
    assert {str(each) for each in refused} == {"ca: cannot be used"}
    # A cancelled caller does not cancel the others, and a failed build is retried.
    assert len(asked) == 1
    made = await asyncio.gather(*[kept.get(own) for _ in range(64)])
    assert len(set(map(id, made))) == 1
    assert len(asked) == 2


async def test_callers_that_wait_for_a_context_fail_when_the_cache_closes(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def slowly(own: Tls) -> ssl.SSLContext:
        release.wait(20)
        return endpoint_context(own)

    monkeypatch.setattr(tls_contexts, "endpoint_context", slowly)
    kept = ContextCache()
    many = [Tls(ca=authority.pem + "\n" * n) for n in range(tls_contexts.TLS_CONTEXT_THREADS + 1)]
    waiting = [asyncio.ensure_future(kept.get(own)) for own in many]
    await asyncio.sleep(0)
    kept.close()
    with pytest.raises(ConnectionAbortedError, match="the transport is closed"):
        await waiting[-1]
    release.set()
    await asyncio.gather(*waiting[:-1])


# ------------------------------------------------------- client certificate required


@pytest.mark.system
async def test_a_receiver_that_requires_a_client_certificate_is_reported(
    authority: Authority,
) -> None:
    """With TLS 1.3 the alert arrives after the client has completed the handshake."""
    context = authority.server("127.0.0.1", clients=authority)

    async def script(connection: Connection) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await connection.send(outgoing.read())
                incoming.write(await connection.read())
            except ssl.SSLError:
                break
        await connection.send(outgoing.read())
        await connection.closed_by_peer()

    async with serving(script) as server, closing(HttpTransport(LOOPBACK)) as transport:
        response = await transport.send(
            to(f"https://127.0.0.1:{server.port}/", tls=Tls(ca=authority.pem))
        )
    assert response.failure is Failure.TLS
    assert response.detail.endswith("certificate required")


# ------------------------------------------------------------------ sessions


@pytest.mark.system
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_new_connection_resumes_the_session_of_the_last_one(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    resumed: list[bool] = []

    async def script(connection: Connection) -> None:
        resumed.append(connection.tls.session_reused)
        await connection.request()
        await connection.send(OK)

    context = authority.server("127.0.0.1")
    context.maximum_version = context.minimum_version = version
    own = Tls(ca=authority.pem)
    async with closing(HttpTransport(LOOPBACK)) as transport, serving(script, context) as server:
        started_at = first_at = time.monotonic()
        for n in range(3):
            assert (await transport.send(to(server, tls=own, keep_alive=False))).status == 200
            first_at = first_at if n else time.monotonic()
        # The certificate is verified again some time after it was verified last.
        context = await transport._contexts.get(own)
        assert isinstance(context, tls.ResumingContext)
        ((name, (session, at)),) = context._sessions.items()
        assert started_at <= at <= first_at, "resuming a session began its age anew"
        context._sessions[name] = session, at - tls.SESSION_AGE_S_MAX
        assert (await transport.send(to(server, tls=own, keep_alive=False))).status == 200
    assert resumed == [False, True, True, False]


@pytest.mark.system
async def test_a_session_with_which_the_server_fails_is_offered_once(authority: Authority) -> None:
    resumed: list[bool] = []

    async def script(connection: Connection) -> None:
        resumed.append(connection.tls.session_reused)
        await connection.request()
        if connection.tls.session_reused:
            connection.reset()
        else:
            await connection.send(OK)

    own = Tls(ca=authority.pem)
    async with (
        closing(HttpTransport(LOOPBACK)) as transport,
        serving(script, authority.server("127.0.0.1")) as server,
    ):
        requests = [to(server, tls=own, keep_alive=False) for _ in range(3)]
        assert [(await transport.send(each)).status for each in requests] == [200, None, 200]
    assert resumed == [False, True, False]


@pytest.mark.system
async def test_a_session_is_not_resumed_with_another_trust(authority: Authority) -> None:
    resumed: list[bool] = []

    async def script(connection: Connection) -> None:
        resumed.append(connection.tls.session_reused)
        await connection.request()
        await connection.send(OK)

    other = Authority("other")
    async with (
        closing(HttpTransport(LOOPBACK)) as transport,
        serving(script, authority.server("127.0.0.1")) as server,
    ):
        for ca, status in ((authority, 200), (other, None), (authority, 200)):
            response = await transport.send(to(server, tls=Tls(ca=ca.pem), keep_alive=False))
            assert response.status == status
    assert resumed == [False, True]


@pytest.mark.system
async def test_a_certificate_needs_a_subject_alternative_name() -> None:
    """One with a common name alone was accepted (RFC 9525, 2)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )  # fmt: skip
    text = certificate.public_bytes(Encoding.PEM).decode()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text + pem(key))
        file.flush()
        context.load_cert_chain(file.name)
    async with (
        closing(HttpTransport(LOOPBACK)) as transport,
        serving(respond_with(OK), context) as server,
    ):
        url = server.url.replace("127.0.0.1", "localhost")
        response = await transport.send(to(url, tls=Tls(ca=text)))
    assert response.failure is Failure.TLS
    assert "localhost" in response.detail
