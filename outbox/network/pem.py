"""Safe parsing of untrusted PEM certificates and private keys.

Tenants supply them, and all relays parse them.  OpenSSL's cost depends on the key: checking
the primality of an 8,676-bit RSA key takes half a minute with the GIL held.  Therefore type
and size are checked first, and computations run on common key types and sizes only.

Primality is not checked, since that takes most of a second for 4,096 bits.  The numbers of an
RSA key must be consistent with each other and with the certificate; a key with composite
"primes" has signatures that no peer accepts, and harms only its owner.
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
"""Parsing one takes OpenSSL most of a millisecond with the GIL held."""
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 4096
CA_RSA_BITS_MAX = 8192
"""The limit for CA keys, which only verify signatures."""
EXPONENT_BITS_MAX = 64
CURVES = ("secp256r1", "secp384r1", "secp521r1")
KINDS = "an RSA key of 2,048 to 4,096 bits, P-256, P-384, P-521 or Ed25519"
UNREADABLE = f"identity: the private key is malformed, or is not {KINDS}"

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
"""DER prefix of a PKCS #8 key of the three types (RFC 5958, 2)."""


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

    too_many = f"{what}: contains more than {CERTIFICATES_MAX} certificates"
    # Two more blocks: the key, and the EC PARAMETERS that openssl writes before one.
    if text.count(BEGIN) > CERTIFICATES_MAX + 2:
        raise UsageError(too_many)
    try:
        certificates = load_pem_x509_certificates(text.encode())
        for each in certificates:
            # cryptography parses these fields lazily: force it here, where errors are handled.
            _ = each.subject, each.not_valid_before_utc, each.not_valid_after_utc
    except ValueError:
        raise UsageError(
            f"{what}: contains no valid certificate; it must be PEM: -----BEGIN CERTIFICATE-----…"
        ) from None
    if len(certificates) > CERTIFICATES_MAX:
        raise UsageError(too_many)
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
    """Parse the private key and check its consistency."""
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
    # Re-encode, so that OpenSSL parses exactly the checked bytes.
    written = f"-----BEGIN {label}-----\n{base64.b64encode(der).decode()}\n-----END {label}-----\n"
    try:
        key = load_pem_private_key(written.encode(), None, unsafe_skip_rsa_key_validation=True)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        # The library's message may quote the key: do not include it.
        raise UsageError(UNREADABLE) from None
    if isinstance(key, RSAPrivateKey):
        if not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
            raise UsageError(
                f"identity: the private key has {key.key_size} bits; it must be {KINDS}"
            )
        if not _is_consistent(key.private_numbers()):
            raise UsageError("identity: the private key is inconsistent")
        return key
    if isinstance(key, EllipticCurvePrivateKey) and key.curve.name in CURVES:
        return key
    if isinstance(key, Ed25519PrivateKey):
        return key
    raise UsageError(UNREADABLE)


def _key_block(text: str) -> tuple[str, str]:
    """Return the label and the body of the only private key block."""
    blocks = (each.partition("-----") for each in text.split(BEGIN)[1:])
    keys = [(label, rest) for label, _, rest in blocks if label.endswith("PRIVATE KEY")]
    if len(keys) != 1:
        raise UsageError(
            f"identity: contains {len(keys) or 'no'} private keys; supply the certificate, its "
            "chain if it has one, and exactly one private key"
        )
    ((label, rest),) = keys
    body, end, _ = rest.partition(f"-----END {label}-----")
    if not end:
        raise UsageError(UNREADABLE)
    return label, body


def _is_consistent(numbers: RSAPrivateNumbers) -> bool:
    """Whether the numbers of an RSA key are consistent.

    Sizes are checked first, which bounds the size of the products.
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
