"""Untrusted certificates and keys are rejected before any expensive computation."""

from __future__ import annotations

import base64
import re
import secrets
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from outbox.core.model.response import Failure
from outbox.destinations.http.transport import HttpTransport
from outbox.errors import UsageError
from outbox.network import pem
from outbox.network.tls import Tls, check_ca, check_identity, endpoint_context
from tests.destinations.authority import Authority
from tests.destinations.conformance import LOOPBACK, closing, to
from tests.destinations.servers import OK, respond_with, serving

if TYPE_CHECKING:
    from collections.abc import Callable

MERSENNE = {2203: 2**2203 - 1, 2281: 2**2281 - 1, 4253: 2**4253 - 1, 4423: 2**4423 - 1}
"""Known primes, so that keys of any size are generated immediately."""
CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
CPU_S_MAX = 2.0
"""Time limit of a rejection in seconds; the fastest of the expensive checks took three."""


def text(key: Any, form: PrivateFormat = PrivateFormat.PKCS8) -> str:
    return key.private_bytes(Encoding.PEM, form, NoEncryption()).decode()  # type: ignore[no-any-return]


@cache
def signer() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def certificate(public_key: Any, *, names: int = 0) -> str:
    """Return a certificate for any public key; its issuer is not checked."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evil")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public_key)
        .serial_number(5)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
    )
    if names:
        listed = [x509.DNSName(f"{n}.example") for n in range(names)]
        made = made.add_extension(x509.SubjectAlternativeName(listed), critical=False)
    return made.sign(signer(), hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def fitting(key: Any) -> str:
    return certificate(key.public_key()) + text(key)


# ---------------------------------------------------------------------- DER encoding


def tlv(tag: int, body: bytes) -> bytes:
    size = len(body)
    if size < 128:
        return bytes([tag, size]) + body
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(length)]) + length + body


def integer(value: int) -> bytes:
    return tlv(2, value.to_bytes(value.bit_length() // 8 + 1))


def sequence(*parts: bytes) -> bytes:
    return tlv(0x30, b"".join(parts))


def block(label: str, der: bytes) -> str:
    body = base64.encodebytes(der).decode()
    return f"-----BEGIN {label}-----\n{body}-----END {label}-----\n"


def rsa_block(n: int, e: int, d: int, p: int, q: int, *rest: int) -> str:
    return block("RSA PRIVATE KEY", sequence(*map(integer, (0, n, e, d, p, q, *rest))))


def mersenne(one: int, two: int) -> str:
    """Return an RSA key of a Mersenne prime, and a certificate for it."""
    p, q = MERSENNE[one], MERSENNE[two]
    e = next(e for e in range(65537, 70000, 2) if (p - 1) % e and (q - 1) % e)
    d = pow(e, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(e, p * q).public_key()
    rest = (d % (p - 1), d % (q - 1), pow(q, -1, p))
    return certificate(public) + rsa_block(p * q, e, d, p, q, *rest)


def odd(bits: int) -> int:
    return secrets.randbits(bits) | 1 | 1 << bits - 1


@cache
def good() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def spoiled(**parts: int) -> str:
    """Return a key with a valid certificate, with some parts replaced."""
    numbers = good().private_numbers()
    public = numbers.public_numbers
    whole = {"n": public.n, "e": public.e, "d": numbers.d, "p": numbers.p, "q": numbers.q}
    whole |= {"dmp1": numbers.dmp1, "dmq1": numbers.dmq1, "iqmp": numbers.iqmp}
    return certificate(good().public_key()) + rsa_block(*(whole | parts).values())


def old(oid: str) -> str:
    """Return a huge Diffie-Hellman or DSA key in its generic encoding."""
    parameters = sequence(integer(odd(60_000)), integer(odd(256)), integer(3))
    algorithm = sequence(tlv(6, bytes.fromhex(oid)), parameters)
    key = sequence(integer(0), algorithm, tlv(4, integer(odd(250))))
    return certificate(signer().public_key()) + block("PRIVATE KEY", key)


def deep() -> str:
    der = b"\x05\x00"
    for _ in range(2500):
        der = tlv(0x30, der)
    return certificate(signer().public_key()) + block("PRIVATE KEY", der)


def explicit_curve() -> str:
    """Return a curve with explicit parameters that match no named curve."""
    field = sequence(tlv(6, bytes.fromhex("2a8648ce3d0101")), integer(odd(20_000)))
    curve = sequence(tlv(4, bytes(32)), tlv(4, bytes(31) + b"\7"))
    parameters = sequence(
        integer(1), field, curve, tlv(4, b"\x04" + bytes(64)), integer(odd(256)), integer(1)
    )
    algorithm = sequence(tlv(6, bytes.fromhex("2a8648ce3d0201")), parameters)
    key = tlv(4, sequence(integer(1), tlv(4, bytes(31) + b"\5")))
    return certificate(signer().public_key()) + block(
        "PRIVATE KEY", sequence(integer(0), algorithm, key)
    )


UNREADABLE = "is malformed or encrypted, or is not an RSA key of 2,048 to 4,096 bits"
HOSTILE: dict[str, tuple[Callable[[], str], str]] = {
    "4,484 bits that fit": (lambda: mersenne(2203, 2281), UNREADABLE),
    "8,676 bits that fit": (lambda: mersenne(4253, 4423), "unsupported key type or size"),
    "1,024 bits": (lambda: fitting(rsa.generate_private_key(65537, 1024)), "unsupported"),  # noqa: S505 (to be refused)
    "huge p": (lambda: spoiled(p=odd(40_000)), UNREADABLE),
    "huge q": (lambda: spoiled(q=odd(40_000)), UNREADABLE),
    "p of the size of n": (lambda: spoiled(p=odd(2048)), UNREADABLE),
    "huge e": (lambda: spoiled(e=odd(30_000)), "does not match"),
    "huge d": (lambda: spoiled(d=odd(30_000)), UNREADABLE),
    "huge exponent of p": (lambda: spoiled(dmp1=odd(30_000)), UNREADABLE),
    "huge exponent of q": (lambda: spoiled(dmq1=odd(30_000)), UNREADABLE),
    "huge inverse": (lambda: spoiled(iqmp=odd(30_000)), UNREADABLE),
    "even": (lambda: spoiled(n=good().private_numbers().public_numbers.n - 1), "does not match"),
    "DSA": (lambda: fitting(dsa.generate_private_key(1024)), "unsupported key type"),  # noqa: S505 (to be refused)
    "DSA of 60,000 bits": (lambda: old("2a8648ce380401"), UNREADABLE),
    "DH of 60,000 bits": (lambda: old("2a864886f70d010301"), UNREADABLE),
    "Ed448": (lambda: fitting(ed448.Ed448PrivateKey.generate()), "unsupported key type"),
    "P-192's sort": (
        lambda: fitting(ec.generate_private_key(ec.SECP256K1())),
        "unsupported key type",
    ),
    "parameters of a curve": (explicit_curve, UNREADABLE),
    "deep": (deep, UNREADABLE),
    "BEGIN again and again": (
        lambda: certificate(signer().public_key()) + "-----BEGIN PRIVATE KEY-----\n" * 500,
        "more than 34",
    ),
    "too long": (lambda: "-----BEGIN PRIVATE KEY-----\n" * 2300, "longer than"),
    "many certificates": (lambda: certificate(signer().public_key()) * 35, "(more|longer) than"),
    "OpenSSH": (
        lambda: (
            certificate(signer().public_key())
            + text(ed25519.Ed25519PrivateKey.generate(), PrivateFormat.OpenSSH)
        ),
        UNREADABLE,
    ),
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_a_hostile_identity_is_rejected_immediately(what: str) -> None:
    make, says = HOSTILE[what]
    given = make()
    began_s = time.process_time()
    for check in (check_identity, lambda pem: endpoint_context(Tls(identity=pem))):
        with pytest.raises(UsageError, match=says) as error:
            check(given)
        assert re.match("identity: [^\n]*$", str(error.value))
    assert time.process_time() - began_s < CPU_S_MAX


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    "what",
    [
        "RSA 2048",
        pytest.param("RSA 4096", marks=pytest.mark.full),  # Making the key takes a second.
        "P-256",
        "P-384",
        "P-521",
        "Ed25519",
    ],
)
async def test_common_key_types_are_accepted_and_work(what: str) -> None:
    key: Any
    forms = [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL]
    match what.split():
        case ["RSA", bits]:
            key = rsa.generate_private_key(65537, int(bits))
        case ["Ed25519"]:
            key, forms = ed25519.Ed25519PrivateKey.generate(), [PrivateFormat.PKCS8]
        case _:
            key = ec.generate_private_key(CURVES[what])
    own, us = certificate(key.public_key()), Authority("us")
    context = us.server("127.0.0.1", clients=us)
    context.load_verify_locations(cadata=own)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    async with (
        serving(respond_with(OK), context) as server,
        closing(HttpTransport(LOOPBACK)) as transport,
    ):
        for form in forms:
            identity = own + text(key, form)
            check_identity(identity)
            response = await transport.send(to(server, tls=Tls(ca=us.pem, identity=identity)))
            assert (response.status, response.detail) == (200, ""), form


@pytest.mark.system
@pytest.mark.parametrize(
    "parts",
    [{"p": 1}, {"p": 0}, {"p": 4}, {"d": 1}, {"dmp1": 7}, {"dmp1": 7, "d": 1}, {"iqmp": 5}, {}],
    ids=str,
)
async def test_a_key_that_is_not_consistent_fails_its_own_endpoint_alone(
    parts: dict[str, int],
) -> None:
    if not parts:
        parts = {"p": good().private_numbers().q}
    us, identity = Authority("us"), spoiled(**parts)
    own = identity.partition("-----BEGIN RSA")[0]
    context = us.server("127.0.0.1", clients=us)
    context.load_verify_locations(cadata=own)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    began_s = time.process_time()
    with suppress(UsageError):
        check_identity(identity)
    async with (
        serving(respond_with(OK), context) as server,
        closing(HttpTransport(LOOPBACK)) as transport,
    ):
        response = await transport.send(to(server, tls=Tls(ca=us.pem, identity=identity)))
        assert response.status == 200 or response.failure in (Failure.TLS, Failure.RESET)
        other = await transport.send(to(server, tls=Tls(ca=us.pem, identity=own + text(good()))))
        assert other.status == 200
    assert time.process_time() - began_s < CPU_S_MAX


def test_a_composite_instead_of_a_prime_is_harmless() -> None:
    """Detecting it would take long, and it harms only its owner."""
    p, q, e = odd(1024), odd(1024), 65537
    while True:
        try:
            d = pow(e, -1, (p - 1) * (q - 1))
            rest = (d % (p - 1), d % (q - 1), pow(q, -1, p))
        except ValueError:
            p, q = odd(1024), odd(1024)
        else:
            if (p * q).bit_length() == 2048:
                break
            p, q = odd(1024), odd(1024)
    public = rsa.RSAPublicNumbers(e, p * q).public_key()
    given = certificate(public) + rsa_block(p * q, e, d, p, q, *rest)
    began_s = time.process_time()
    endpoint_context(Tls(identity=given, ca=certificate(signer().public_key())))
    assert time.process_time() - began_s < CPU_S_MAX


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: certificate(signer().public_key()) * 35, "more than 34"),
        (lambda: certificate(dsa.generate_private_key(1024).public_key()), "unsupported key type"),  # noqa: S505 (to be refused)
        (lambda: mersenne(4253, 4423).partition("-----BEGIN RSA")[0], "unsupported key type"),
    ],
)
def test_hostile_authorities_are_rejected_immediately(make: Callable[[], str], says: str) -> None:
    given = make()
    began_s = time.process_time()
    for check in (check_ca, lambda pem: endpoint_context(Tls(ca=pem))):
        with pytest.raises(UsageError, match=f"ca: .*{says}"):
            check(given)
    assert time.process_time() - began_s < CPU_S_MAX


def test_a_certificate_with_many_names_is_checked_quickly() -> None:
    given = certificate(signer().public_key(), names=2500)
    assert len(given) < pem.CA_CHARS_MAX
    began_s = time.process_time()
    check_ca(given)
    assert time.process_time() - began_s < CPU_S_MAX


def test_openssl_gets_only_the_checked_blocks() -> None:
    """OpenSSL would also read certificates in other encodings."""
    hidden = mersenne(4253, 4423).partition("-----BEGIN RSA")[0]
    given = certificate(signer().public_key()) + hidden.replace(
        "CERTIFICATE", "TRUSTED CERTIFICATE"
    )
    assert len(endpoint_context(Tls(ca=given)).get_ca_certs(binary_form=True)) <= 1


@pytest.mark.system
async def test_a_hostile_identity_in_the_table_fails_its_own_endpoint_alone() -> None:
    us = Authority("us")
    async with (
        serving(respond_with(OK), us.server("127.0.0.1")) as server,
        closing(HttpTransport(LOOPBACK)) as transport,
    ):
        hostile = await transport.send(
            to(server, tls=Tls(ca=us.pem, identity=mersenne(2203, 2281)))
        )
        other = await transport.send(to(server, tls=Tls(ca=us.pem)))
    assert hostile.failure is Failure.TLS
    assert UNREADABLE in hostile.detail
    assert other.status == 200
