"""No usable secret is in a tracked file.

detect-secrets scans every tracked file. False positives are in `NONE`, with the reason; entries
that are no longer found must be removed. History is not scanned: a checkout of CI may have none,
and a pushed secret must be revoked anyway.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from detect_secrets import SecretsCollection
from detect_secrets.settings import transient_settings

from tests.repository.sources import ROOT, tracked
from tests.support.checkout import require_checkout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OWN = ROOT / "tests" / "support" / "own_secrets.py"

PLUGINS: list[dict[str, object]] = [
    {"name": "FormDetector", "path": OWN.as_uri()},
    {"name": "KeywordDetector"},
    {"name": "Base64HighEntropyString", "limit": 4.5},
    {"name": "HexHighEntropyString", "limit": 3.0},
]

LINES_FILTER = {"path": f"{OWN.as_uri()}::is_without_candidate"}
"""Omits lines before the detectors are called, for speed only."""

FILTERS = [
    LINES_FILTER,
    {"path": f"{OWN.as_uri()}::is_let_off"},
    *(
        {"path": f"detect_secrets.filters.heuristic.{name}"}
        for name in (
            "is_likely_id_string",
            "is_lock_file",
            "is_not_alphanumeric_string",
            "is_potential_uuid",
            "is_prefixed_with_dollar_sign",
            "is_sequential_string",
            "is_swagger_file",
            "is_templated_secret",
        )
    ),
]
"""The plugins of detect-secrets; the two that are called for each line are configured differently.
"""

NONE: dict[str, tuple[str, ...]] = {
    "drawn once for the README, and never used": (
        "whsec_u1nYZr3dyzUyQ6rZ7zYl8XkFhPjR0oW2mYb6W1p1n3c=",
        "obx_Vb7Qm2Xc9Zk4Lw1Pt8Ry5Ns3Hd6Jf0Gg2Aa4Ss7Dd9F",
        "obx_0W3cV0lJm8b2Q4s6U8wYzA1cE3gI5kM7oP9rT0vX2zB",
    ),
    "a word, or a prefix with text around it": (
        "guest", "secret", "password", "it\\\\", "whsec_", "whsec_!", "whsec_x", "obkey_",
        "Known by its form", "whsec_…", "whpk_…", "whsec_…` (HMAC), or `whsk_…",
        "whsec_…` or (Ed25519) `whsk_…", "SELECT key, count FROM count_secrets_by_key()",
        "BEGIN PRIVATE KEY", "a relay has no signing secret of its own", "string",
        "whsec_…`, or public key, `whpk_…",
    ),
    "how a text is a secret, or a secret of a compat signature in a test": (
        "raw", "base64", "hex", "one", "two", "new", "hub-4711", "not base64!", "whsec_MTIz",
    ),
    "a secret of an imaginary customer of another sender": (
        "convoy-secret", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    ),
    "a signature in the tests of Outpost, or in the documentation of GitHub": (
        "7054f74dae9f73e82b56ca73e8f81450097c698eeda0b00bb8728e89796baf2d",
        "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
    ),
    "the name of a Secret of Kubernetes": ("mine", "outbox", "owner", "tls"),
    "what a test looks for where it must not be": (
        "pw", "hunter2", "Bearer hunter2", "canaryproxypassword",
        "hunter2xyz", "Zq9vX2kPw", "4711-secret", "4711-do-not-tell",
        "s3cr3t-token", "p%zz{SECRET}", "{SECRET}%00", "{SECRET}\\udcff", "%ff{SECRET}",
        "user:secret@h/s",
    ),
    "a point of small order, which libsodium lists": (
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    ),
    "a test's own, and says so in clear": (
        "dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ=",
        "QSBzZWNyZXQgdGhhdCBub2JvZHkgaGFzLg==",
        "whsec_dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ=",
        "whsec_YW5vdGhlciBzZWNyZXQgZm9yIHRlc3Rpbmc=",
        "whsec_c2ltdWxhdGVkIHNlY3JldCBvZiAzMiBieXRlcw==",
        "obx_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",
    ),
    "published: of RFC 8032 and Trace Context, a public key, and kinds of keys": (
        "06072a8648ce3d0201", "06092a864886f70d010101",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da",
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        "0af7651916cd43dd8448eb211c80319c",
        "whpk_O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik=",
    ),
}  # fmt: skip
"""False positives, by reason."""
KNOWN = {value for values in NONE.values() for value in values}


def found(paths: Iterable[Path], filters: Sequence[dict[str, str]] = FILTERS) -> dict[str, str]:
    """Return the secrets found in these files, with their locations."""
    secrets = SecretsCollection()
    with transient_settings({"plugins_used": PLUGINS, "filters_used": [*filters]}):
        for path in paths:
            secrets.scan_file(str(path))
    return {
        str(secret.secret_value): f"{Path(place).name}, line {secret.line_number}: {secret.type}"
        for place, secret in secrets
    }


@pytest.fixture(scope="session")
def files() -> tuple[Path, ...]:
    require_checkout()
    return tracked()


@pytest.mark.slow
@pytest.mark.system
def test_no_tracked_file_contains_a_secret(files: tuple[Path, ...]) -> None:
    there = found(files)
    assert {value: place for value, place in there.items() if value not in KNOWN} == {}, (
        "if it is none, add it to NONE, with the reason; if it is one, revoke it first"
    )


@pytest.mark.full
def test_no_finding_is_in_a_line_that_is_omitted_for_speed(files: tuple[Path, ...]) -> None:
    assert found(files) == found(files, [each for each in FILTERS if each is not LINES_FILTER])


@pytest.mark.system
def test_known_false_positives_still_exist(files: tuple[Path, ...]) -> None:
    texts = [path.read_text("utf-8", "replace") for path in files if path != Path(__file__)]
    stale = [each for each in KNOWN if not any(each in text for text in texts)]
    assert stale == [], "strike them off NONE"


# Concatenated here, so that they are not found in this file.
_RAW = bytes(range(1, 33))
PLANTED = {
    "an AWS key": "AKIA" + "Q7ZP2M5XW3VBN8KD",
    "a private key": "-----BEGIN " + "PRIVATE KEY-----",
    "a signing secret": "whsec_" + base64.b64encode(_RAW).decode(),
    "an ed25519 key": "whsk_" + base64.b64encode(_RAW).decode(),
    "an API token": "obx_" + base64.urlsafe_b64encode(_RAW).decode().rstrip("="),
    "a key of secrets": "obkey_" + base64.urlsafe_b64encode(_RAW).decode().rstrip("="),
    "a fetch token": "obf_" + base64.urlsafe_b64encode(_RAW).decode().rstrip("="),
    "a GitHub token": "ghp_" + "Zx81mQ" * 6,
    "a password in a URL": "postgresql://app:" + "c0rrect-h0rse" + "@db/app",
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("name", ["a.py", "a.md", "a.yml", "outbox.toml", "run"])
def test_a_planted_secret_is_found(tmp_path: Path, what: str, name: str) -> None:
    place = tmp_path / name
    place.write_text(f"# A line before\nvalue: {PLANTED[what]}\n")
    assert any("line 2" in finding for finding in found([place]).values())
