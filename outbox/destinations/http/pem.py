"""Certificates and private keys as texts, read without being at their mercy.

A tenant may hand in both, and the relays of everybody read them.  OpenSSL does
what a key tells it to: proving that the parts of an RSA key of 8,676 bits are
prime takes it half a minute, and the interpreter stands still meanwhile.  So
what a text is comes first, how large it is second, and only what is of a usual
kind and size is computed with.

Nobody proves that anything is prime, since that takes most of a second for a
key of 4,096 bits.  The parts of an RSA key must fit each other and its
certificate; whose are not prime has a key that nobody believes, and harms no
one else.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPrivateNumbers
    from cryptography.x509 import Certificate

    PrivateKey = RSAPrivateKey | EllipticCurvePrivateKey | Ed25519PrivateKey

CA_CHARS_MAX = 64 * 1024
IDENTITY_CHARS_MAX = 16 * 1024
CERTIFICATES_MAX = 32
"""Each takes OpenSSL most of a millisecond, and the interpreter waits for it."""
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 4096
CA_RSA_BITS_MAX = 8192
"""Of those who sign: with their keys signatures are only checked."""
EXPONENT_BITS_MAX = 64
CURVES = ("secp256r1", "secp384r1", "secp521r1")
KINDS = "an RSA key of 2,048 to 4,096 bits, P-256, P-384, P-521 or Ed25519"
UNREADABLE = f"identity: the private key cannot be read, or is not {KINDS}"

_RSA, _EC, _ED25519 = "1.2.840.113549.1.1.1", "1.2.840.10045.2.1", "1.3.101.112"
BEGIN = "-----BEGIN "
LABELS = ("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY")
_LENGTH = rb"(?:[\x00-\x7f]|\x81.|\x82..)"
_OIDS = b"|".join(
    re.escape(bytes.fromhex(each))
    for each in ("06092a864886f70d010101", "06072a8648ce3d0201", "06032b6570")
)
_PKCS8 = re.compile(
    rb"\x30" + _LENGTH + rb"\x02\x01[\x00\x01]\x30" + _LENGTH + b"(?:" + _OIDS + b")", re.DOTALL
)
"""How a key of one of the three kinds begins (RFC 5958, 2)."""


def authorities(text: str) -> list[Certificate]:
    """The certificates to trust.

    Raises:
        UsageError: there are none, or some cannot be trusted; one line that says why.
    """
    _hold_to_size(text, CA_CHARS_MAX, "ca")
    if "PRIVATE KEY-----" in text:
        raise UsageError("ca: holds a private key; give certificates alone")
    return _certificates(text, "ca")


def identity(text: str) -> tuple[list[Certificate], PrivateKey]:
    """A chain, beginning with the key's own certificate, and the key.

    Raises:
        UsageError: it is not a certificate with its key, or they are of no usual kind;
            one line that says why, and shows nothing of the key.
    """
    _hold_to_size(text, IDENTITY_CHARS_MAX, "identity")
    chain = _certificates(text, "identity")
    key = _key(text)
    if key.public_key() != chain[0].public_key():
        raise UsageError("identity: the private key is not the first certificate's")
    return chain, key


def _hold_to_size(text: str, chars_max: int, what: str) -> None:
    if len(text) > chars_max:
        raise UsageError(f"{what}: longer than {chars_max} characters")


def _certificates(text: str, what: str) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    too_many = f"{what}: holds more than {CERTIFICATES_MAX} certificates"
    # Beside them stand a key, and what openssl writes before one on a curve.
    if text.count(BEGIN) > CERTIFICATES_MAX + 2:
        raise UsageError(too_many)
    try:
        certificates = load_pem_x509_certificates(text.encode())
        for each in certificates:
            # Asked now, because these are read when they are asked for, and may be anything.
            _ = each.subject, each.not_valid_before_utc, each.not_valid_after_utc
    except ValueError:
        raise UsageError(
            f"{what}: holds no certificate that can be read; it must be PEM: "
            "-----BEGIN CERTIFICATE-----…"
        ) from None
    if len(certificates) > CERTIFICATES_MAX:
        raise UsageError(too_many)
    for each in certificates:
        _hold_to_kind(each, what)
    return certificates


def _hold_to_kind(certificate: Certificate, what: str) -> None:
    """Let pass a certificate with whose key it is safe to compute."""
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    usual = certificate.public_key_algorithm_oid.dotted_string in (_RSA, _EC, _ED25519)
    if usual:
        try:
            key = certificate.public_key()
        except (ValueError, UnsupportedAlgorithm, InternalError):
            usual = False
        else:
            if isinstance(key, RSAPublicKey):
                numbers = key.public_numbers()
                usual = (
                    RSA_BITS_MIN <= key.key_size <= CA_RSA_BITS_MAX
                    and numbers.e.bit_length() <= EXPONENT_BITS_MAX
                )
            elif isinstance(key, EllipticCurvePublicKey):
                usual = key.curve.name in CURVES
    if not usual:
        raise UsageError(
            f"{what}: a certificate's key is of no usual kind or size; it must be {KINDS}"
        )


def _key(text: str) -> PrivateKey:
    """The one private key in a text, which fits itself."""
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    label, body = _key_block(text)
    if label.startswith("ENCRYPTED") or "Proc-Type:" in body:
        raise UsageError(
            "identity: the private key is encrypted; decrypt it first, with openssl pkey"
        )
    try:
        der = base64.b64decode("".join(body.split()), validate=True)
    except ValueError:
        raise UsageError(UNREADABLE) from None
    if label not in LABELS or (label == "PRIVATE KEY" and not _PKCS8.match(der)):
        raise UsageError(UNREADABLE)
    # Written anew, so that what was looked at is what is loaded.
    written = f"-----BEGIN {label}-----\n{base64.b64encode(der).decode()}\n-----END {label}-----\n"
    try:
        key = load_pem_private_key(written.encode(), None, unsafe_skip_rsa_key_validation=True)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        # Without the library's words, which may quote what it could not read.
        raise UsageError(UNREADABLE) from None
    if isinstance(key, RSAPrivateKey):
        if not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
            raise UsageError(
                f"identity: the private key has {key.key_size} bits; it must be {KINDS}"
            )
        if not _is_whole(key.private_numbers()):
            raise UsageError("identity: the parts of the private key do not fit each other")
        return key
    if isinstance(key, EllipticCurvePrivateKey) and key.curve.name in CURVES:
        return key
    if isinstance(key, Ed25519PrivateKey):
        return key
    raise UsageError(UNREADABLE)


def _key_block(text: str) -> tuple[str, str]:
    """The label of the one private key in a text, and what stands in it."""
    blocks = (each.partition("-----") for each in text.split(BEGIN)[1:])
    keys = [(label, rest) for label, _, rest in blocks if label.endswith("PRIVATE KEY")]
    if len(keys) != 1:
        raise UsageError(
            f"identity: holds {len(keys) or 'no'} private keys; it must hold a certificate, its "
            "chain if it has one, and the certificate's private key"
        )
    ((label, rest),) = keys
    body, end, _ = rest.partition(f"-----END {label}-----")
    if not end:
        raise UsageError(UNREADABLE)
    return label, body


def _is_whole(numbers: RSAPrivateNumbers) -> bool:
    """Whether the parts of an RSA key of a good size fit each other.

    Sizes come first, so that no product is larger than the key.
    """
    n, e, d = numbers.public_numbers.n, numbers.public_numbers.e, numbers.d
    p, q = numbers.p, numbers.q
    half = n.bit_length() // 2 + 1
    return (
        1 < e < 1 << EXPONENT_BITS_MAX
        and 1 < d < n
        and 1 < p < 1 << half
        and 1 < q < 1 << half
        and p != q
        and p * q == n
        and n & e & 1 == 1
        and e * d % (p - 1) == 1
        and e * d % (q - 1) == 1
        and numbers.dmp1 == d % (p - 1)
        and numbers.dmq1 == d % (q - 1)
        and 0 < numbers.iqmp < p
        and q * numbers.iqmp % p == 1
    )
