"""The formats of secrets: the project's own, and those of services.

The formats of services are detect-secrets' own. One detector searches for all of them, because a
detector costs more per line than its patterns.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

from detect_secrets.filters.allowlist import is_line_allowlisted
from detect_secrets.filters.heuristic import is_indirect_reference
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.basic_auth import BasicAuthDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
from detect_secrets.plugins.jwt import JwtTokenDetector
from detect_secrets.plugins.keyword import DENYLIST as KEYWORDS
from detect_secrets.plugins.npm import NpmDetector
from detect_secrets.plugins.openai import OpenAIDetector
from detect_secrets.plugins.private_key import PrivateKeyDetector
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.stripe import StripeDetector

if TYPE_CHECKING:
    from detect_secrets.util.code_snippet import CodeSnippet

THEIRS = (
    AWSKeyDetector,
    AzureStorageKeyDetector,
    BasicAuthDetector,
    GitHubTokenDetector,
    GitLabTokenDetector,
    JwtTokenDetector,
    NpmDetector,
    OpenAIDetector,
    PrivateKeyDetector,
    PypiTokenDetector,
    SlackDetector,
    StripeDetector,
)


class FormDetector(RegexBasedDetector):
    """The project's signing secrets, private keys and tokens, and those of services."""

    secret_type = "Known by its form"

    denylist = (
        re.compile(r"whsec_[A-Za-z0-9+/]{32,88}={0,2}"),
        re.compile(r"whsk_[A-Za-z0-9+/]{43,88}={0,2}"),
        re.compile(r"ob[xf]_[A-Za-z0-9_-]{43}"),
        re.compile(r"obkey_[A-Za-z0-9_-]{43}"),
        *chain.from_iterable(each.denylist for each in THEIRS),
    )


# Entropy above 3.0 takes nine hexadecimal digits, and above 4.5 at least 23 base64 characters.
_QUOTED = re.compile(r"""['"](?:[0-9a-fA-F]{9,}|[A-Za-z0-9+/\\_=-]{23,})['"]""")
_FORM = re.compile(
    "|".join(
        f"(?i:{form.pattern})" if form.flags & re.IGNORECASE else f"(?:{form.pattern})"
        for form in FormDetector.denylist
    )
)
_KEYWORD = re.compile("|".join(KEYWORDS))


def is_without_candidate(line: str) -> bool:
    """Whether no detector can find a secret in a line.

    Evaluated before the detectors: one search each is faster than what detect-secrets does to call
    one of them, and few lines have a candidate.
    """
    return not (_QUOTED.search(line) or _FORM.search(line) or _KEYWORD.search(line.lower()))


def is_let_off(filename: str, context: CodeSnippet, secret: str) -> bool:
    """Whether a line is marked as free of secrets, or looks like a call.

    Evaluated for matches only (because of the parameter `secret`); detect-secrets evaluates its own
    two filters for every line, which takes as long as all detectors.
    """
    line = context.target_line.rstrip()
    return is_indirect_reference(line) or is_line_allowlisted(filename, line, context)
