"""URLs and credentials of NATS endpoints.

    nats://host[:port]/SUBJECT[?stream=NAME]
    nats+tls://host[:port]/SUBJECT[?stream=NAME]

NATS's own scheme for TLS is `tls://`.  It is not used here: the scheme of an endpoint's URL selects
the destination, and `tls` names none.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from outbox.core.model.text import quoted
from outbox.errors import UsageError

NATS_PORT = 4222
SCHEMES = ("nats", "nats+tls")
URL_CHARS_MAX = 2048
SUBJECT_TOKENS_MAX = 16
CREDS_HEADER = "-----BEGIN NATS USER JWT-----"
_FORM = "use a form such as nats+tls://nats.example.com/SUBJECT?stream=NAME"
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,255}")
_VISIBLE = re.compile(r"[\x21-\x7e]+")


class NatsTarget(NamedTuple):
    """Where the messages of an endpoint are published."""

    host: str
    port: int
    secure: bool
    """Whether the connection uses TLS."""
    subject: str
    """First tokens of the lanes' subjects."""
    stream: str | None
    """The stream's name; None: the stream that has the subject."""

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """Host and port."""
        return ((self.host, self.port),)


class NatsCredentials(NamedTuple):
    """Credentials in one of three forms; all None: no authentication."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    creds: str | None = None
    """Content of a `.creds` file: a JWT and the seed of its nkey."""


def parse_url(url: str) -> NatsTarget:
    """Parse the URL of a NATS endpoint.

    Raises:
        UsageError: it is not valid; one line with the next step.
    """
    if len(url) > URL_CHARS_MAX:
        raise UsageError(f"url: longer than {URL_CHARS_MAX} characters")
    if not _VISIBLE.fullmatch(url):
        raise UsageError("url: must contain visible ASCII only")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"url: malformed: {error}; {_FORM}") from None
    if parts.scheme not in SCHEMES:
        raise UsageError("url: must start with nats+tls://, or with nats:// in an open network")
    if "@" in parts.netloc:
        raise UsageError(
            "url: must not contain a user, password or token; set them with "
            "`outbox endpoint credentials`, or credentials= of a reader"
        )
    if "#" in url:
        raise UsageError("url: must not have a fragment (#…)")
    if not parts.hostname:
        raise UsageError(f"url: has no host; {_FORM}")
    if port == 0:
        raise UsageError("url: port 0 is not valid")
    return NatsTarget(
        parts.hostname,
        port or NATS_PORT,
        parts.scheme == "nats+tls",
        _parse_subject(parts.path.removeprefix("/")),
        _parse_stream(parts.query),
    )


def parse_credentials(text: str | None) -> NatsCredentials:
    """Parse credentials: `user:password`, a token, or the content of a `.creds` file.

    Raises:
        UsageError: the text is none of these; the message contains nothing of it.
    """
    if not text:
        return NatsCredentials()
    if CREDS_HEADER in text:
        return NatsCredentials(creds=text)
    user, colon, password = text.partition(":")
    if not colon:
        return NatsCredentials(token=text)
    if not user:
        raise UsageError("credentials: have no user; use user:password, a token or a .creds file")
    return NatsCredentials(user=user, password=password)


def _parse_subject(subject: str) -> str:
    if not subject:
        raise UsageError(f"url: has no subject; {_FORM}")
    if not _SUBJECT.fullmatch(subject):
        raise UsageError(
            f"url: {quoted(subject)} is not a subject here: tokens have letters, digits, _ and -, "
            "and are separated by dots, without wildcards"
        )
    if subject.count(".") >= SUBJECT_TOKENS_MAX:
        raise UsageError(f"url: the subject has more than {SUBJECT_TOKENS_MAX} tokens")
    if subject.startswith("_INBOX"):
        raise UsageError("url: subjects in _INBOX are for replies; choose another subject")
    return subject


def _parse_stream(query: str) -> str | None:
    if not query:
        return None
    options = parse_qsl(query, keep_blank_values=True)
    if len(options) != 1 or options[0][0] != "stream":
        raise UsageError("url: the only option is stream, once: ?stream=NAME")
    if not _STREAM.fullmatch(options[0][1]):
        raise UsageError(
            f"url: {quoted(options[0][1])} is not the name of a stream: letters, digits, _ and -"
        )
    return options[0][1]
