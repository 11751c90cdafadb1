"""URLs and credentials of NATS endpoints.

    nats://host[:port]/SUBJECT[?stream=NAME]
    nats+tls://host[:port]/SUBJECT[?stream=NAME]

NATS's own scheme for TLS is `tls://`.  It is not used here: the scheme of an endpoint's URL selects
the destination, and `tls` names none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from outbox.core.brokers.broker_url import parse_broker_url
from outbox.core.model.text import quoted
from outbox.errors import UsageError

NATS_PORTS = {"nats+tls": 4222, "nats": 4222}
SUBJECT_TOKENS_MAX = 16
CREDS_HEADER = "-----BEGIN NATS USER JWT-----"
_FORM = "nats+tls://nats.example.com/SUBJECT?stream=NAME"
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,255}")


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

    @property
    def streams(self) -> tuple[object, ...]:
        """What names the lanes' subjects."""
        return self.stream, self.subject


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
    parts = parse_broker_url(url, ports=NATS_PORTS, path="subject", options=("stream",), form=_FORM)
    ((host, port),) = parts.servers
    stream = parts.options.get("stream")
    if stream is not None and not _STREAM.fullmatch(stream):
        raise UsageError(
            f"url: {quoted(stream)} is not the name of a stream: letters, digits, _ and -"
        )
    return NatsTarget(host, port, parts.scheme == "nats+tls", _check_subject(parts.path), stream)


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


def _check_subject(subject: str) -> str:
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
