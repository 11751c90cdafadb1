"""The libraries of other senders accept their form of the compat signature, and nothing else."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.messages.message import prepare
from outbox.core.model.compat import CompatSetting
from outbox.core.model.headers import EndpointHeaders, parse_lines
from outbox.core.model.message_format import MessageFormat
from outbox.errors import CannotRun
from tests.receiver.deliveries import SECRET, delivery
from tests.support.npm import NodeScript
from tests.support.pypi import library

pytestmark = pytest.mark.system

SVIX = "whsec_" + base64.b64encode(bytes(range(24))).decode()
SECRETS = {"svix": SVIX, "github": "It's a Secret to Everybody", "stripe": "whsec_ExAmPlE/4711"}
PAYLOAD = '{"total": 12, "note": "é\\u2028 🛒"}'.encode()


def requests(preset: str) -> list[tuple[dict[str, str], bytes]]:
    """Requests as they are sent: of each format, and a batch, during a rotation of the secret."""
    compat = CompatSetting().parse("compat", preset)
    keys = [(compat.decode(SECRETS[preset]), None), (compat.decode(SVIX[:-1] + "B"), None)]
    headers = EndpointHeaders(computed=CompatSigner(compat, keys))
    one = delivery(1, payload=PAYLOAD)
    formats: tuple[Any, ...] = ("raw", "envelope", "cloudevents")
    found = [
        prepare(one, 0, headers=headers, message_format=MessageFormat(f, "/")) for f in formats
    ]
    found.append(prepare_batch([one, delivery(2, payload=PAYLOAD)], 0, headers=headers))
    now = int(time.time())
    return [(dict(parse_lines(each.attempt(1, now, [SECRET]))), each.body) for each in found]


def test_svix_accepts_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    svix = library(monkeypatch, "svix", "2.9.1")
    for headers, body in requests("svix"):
        svix.Webhook(SVIX).verify(body, headers)
        with pytest.raises(svix.webhooks.WebhookVerificationError):
            svix.Webhook(SVIX).verify(body + b" ", headers)


def test_stripe_accepts_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    stripe = library(monkeypatch, "stripe", "16.1.0")
    for headers, body in requests("stripe"):
        signature, secret = headers["Stripe-Signature"], SECRETS["stripe"]
        verify = stripe.WebhookSignature.verify_header
        assert verify(body.decode(), signature, secret, tolerance=300)
        with pytest.raises(stripe.SignatureVerificationError):
            verify(body.decode() + " ", signature, secret, tolerance=300)


def test_octokit_accepts_githubs_form() -> None:
    try:
        octokit = NodeScript("@octokit/webhooks", "14.2.0", "octokit.mjs")
    except CannotRun as error:
        pytest.skip(str(error))
    asked = [
        {
            "secret": SECRETS["github"],
            "body": body.decode() + more,
            "signature": headers["X-Hub-Signature-256"],
        }
        for headers, body in requests("github")
        for more in ("", " ")
    ]
    assert octokit.run(asked) == [True, False] * 4
