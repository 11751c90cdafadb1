"""A receiver whose secret is a public key."""

from outbox.core.messages.ed25519 import parse_private_key
from outbox.receiver import SignatureMismatch, verify
from outbox.testing import sign

private = "whsk_" + "A" * 43
public = parse_private_key(private).public_text
assert verify(sign(private, "id", b"body"), b"body", public).message_id == "id"
try:
    verify(sign(private, "id", b"body"), b"another", public)
except SignatureMismatch:
    pass
else:
    raise AssertionError("another body has the same signature")
