"""Safe parsing of untrusted PEM certificates and private keys.

Tenants supply them, and all relays parse them.  OpenSSL's cost depends on the key: checking
the primality of an 8,676-bit RSA key takes half a minute with the GIL held.  Therefore type
and size are checked first, and computations run on common key types and sizes only.

Whether the numbers of an RSA key fit together is not checked, since that harms only the owner of
the key.  Their sizes are, because signing with a prime of 40,000 bits would stop the relay.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.x509 import Certificate

    PrivateKey = RSAPrivateKey | EllipticCurvePrivateKey | Ed25519PrivateKey

CA_CHARS_MAX = 64 * 1024
IDENTITY_CHARS_MAX = 16 * 1024
BLOCKS_MAX = 34
"""Parsing a certificate takes OpenSSL most of a millisecond with the GIL held."""
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 4096
CA_RSA_BITS_MAX = 8192
"""The limit for CA keys, which only verify signatures."""
EXPONENT_BITS_MAX = 64
CURVES = ("secp256r1", "secp384r1", "secp521r1")
KINDS = "an RSA key of 2,048 to 4,096 bits, P-256, P-384, P-521 or Ed25519"

_RSA, _EC, _ED25519 = "1.2.840.113549.1.1.1", "1.2.840.10045.2.1", "1.3.101.112"
_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----(.*?)-----END \1-----", re.DOTALL)
_LABELS = ("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY")
_OIDS = tuple(map(bytes.fromhex, ("06092a864886f70d010101", "06072a8648ce3d0201", "06032b6570")))
"""DER of the three types, which follows the lengths and the version of PKCS #8 (RFC 5958, 2)."""


def parse_authorities(text: str) -> list[Certificate]:
    """Parse CA certificates.

    Raises:
        UsageError: there are none, or one is not acceptable.
    """
    _check_size(text, CA_CHARS_MAX, "ca")
    if "PRIVATE KEY-----" in text:
        raise UsageError("ca: contains a private key; supply certificates only")
    return _certificates(text, "ca")


def parse_identity(text: str) -> tuple[list[Certificate], PrivateKey]:
    """Parse a certificate chain, leaf first, and its private key.

    Raises:
        UsageError: the text is not a certificate with its key, or the key type is not
            supported; the message contains nothing of the key.
    """
    _check_size(text, IDENTITY_CHARS_MAX, "identity")
    chain = _certificates(text, "identity")
    key = _key(text)
    if key.public_key() != chain[0].public_key():
        raise UsageError("identity: the private key does not match the first certificate")
    return chain, key


def _check_size(text: str, chars_max: int, what: str) -> None:
    if len(text) > chars_max:
        raise UsageError(f"{what}: longer than {chars_max} characters")


def _certificates(text: str, what: str) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    if text.count("-----BEGIN ") > BLOCKS_MAX:
        raise UsageError(f"{what}: contains more than {BLOCKS_MAX} certificates and keys")
    try:
        certificates = load_pem_x509_certificates(text.encode())
        for each in certificates:
            # cryptography parses these fields lazily: force it here, where errors are handled.
            _ = each.subject, each.not_valid_before_utc, each.not_valid_after_utc
    except ValueError:
        raise UsageError(
            f"{what}: contains no valid certificate; it must be PEM: -----BEGIN CERTIFICATE-----…"
        ) from None
    for each in certificates:
        _check_key_type(each, what)
    return certificates


def _check_key_type(certificate: Certificate, what: str) -> None:
    """Reject certificates whose key type or size makes computations expensive."""
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    is_supported = certificate.public_key_algorithm_oid.dotted_string in (_RSA, _EC, _ED25519)
    if is_supported:
        try:
            key = certificate.public_key()
        except (ValueError, UnsupportedAlgorithm, InternalError):
            is_supported = False
        else:
            if isinstance(key, RSAPublicKey):
                numbers = key.public_numbers()
                is_supported = (
                    RSA_BITS_MIN <= key.key_size <= CA_RSA_BITS_MAX
                    and numbers.e.bit_length() <= EXPONENT_BITS_MAX
                )
            elif isinstance(key, EllipticCurvePublicKey):
                is_supported = key.curve.name in CURVES
    if not is_supported:
        raise UsageError(
            f"{what}: a certificate has an unsupported key type or size; it must be {KINDS}"
        )


def _key(text: str) -> PrivateKey:
    """Parse the only private key."""
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    blocks = _KEY.findall(text)
    if len(blocks) != 1:
        raise UsageError(
            f"identity: contains {len(blocks) or 'no'} private keys; supply the certificate, its "
            "chain if it has one, and exactly one private key"
        )
    ((label, body),) = blocks
    try:
        der = base64.b64decode("".join(body.split()), validate=True)
        if label in _LABELS and (label != _LABELS[0] or any(oid in der[7:22] for oid in _OIDS)):
            # Re-encoded, so that exactly the checked bytes are parsed.
            block = (
                f"-----BEGIN {label}-----\n{base64.b64encode(der).decode()}\n-----END {label}-----"
            )
            key = load_pem_private_key(block.encode(), None, unsafe_skip_rsa_key_validation=True)
            if isinstance(key, Ed25519PrivateKey):
                return key
            if isinstance(key, EllipticCurvePrivateKey) and key.curve.name in CURVES:
                return key
            if isinstance(key, RSAPrivateKey) and _has_common_sizes(key):
                return key
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        pass  # The library's message may quote the key.
    raise UsageError(
        f"identity: the private key is malformed or encrypted, or is not {KINDS}; to decrypt one: "
        "openssl pkey"
    )


def _has_common_sizes(key: RSAPrivateKey) -> bool:
    numbers, bits = key.private_numbers(), key.key_size
    primes = (numbers.p, numbers.q)
    exponents = (numbers.d, numbers.dmp1, numbers.dmq1, numbers.iqmp)
    return (
        RSA_BITS_MIN <= bits <= RSA_BITS_MAX
        and max(each.bit_length() for each in primes) <= bits // 2 + 1
        and max(each.bit_length() for each in exponents) <= bits
    )
