"""What secrets look like that have a form of their own: ours, and those of services.

The forms of services are detect-secrets' own.  They are looked for by one detector instead of
by one each, because asking a detector about a line costs more than its patterns do.
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
    """Our signing secrets, private keys and tokens, and what services hand out."""

    secret_type = "Known by its form"

    denylist = (
        re.compile(r"whsec_[A-Za-z0-9+/]{32,88}={0,2}"),
        re.compile(r"whsk_[A-Za-z0-9+/]{43,88}={0,2}"),
        re.compile(r"ob[xf]_[A-Za-z0-9_-]{43}"),
        re.compile(r"obkey_[A-Za-z0-9_-]{43}"),
        *chain.from_iterable(each.denylist for each in THEIRS),
    )


def is_let_off(filename: str, context: CodeSnippet, secret: str) -> bool:
    """Whether a line says that it has no secret, or looks like a call.

    Asked about what was found alone, because it has `secret`; detect-secrets asks its own two
    filters about every line, which takes as long as all detectors do.
    """
    line = context.target_line.rstrip()
    return is_indirect_reference(line) or is_line_allowlisted(filename, line, context)
