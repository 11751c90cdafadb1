"""What errors of Kafka and librdkafka mean for an append."""

from __future__ import annotations

import errno
import os
import re
import time

from confluent_kafka import KafkaError, KafkaException

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import one_line
from outbox.network.errors import OWN_ERRORS, is_own_failure, lacks_descriptors

REFUSED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
    }
)
"""A record is refused; in a batch of several it may be another one, or their size together."""

MISCONFIGURED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError._UNSUPPORTED_FEATURE,
    }
)
"""The broker stores nothing until a person acts."""

ABSENT = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)
"""The topic or partition does not exist, or a server does not know it yet."""


_OWN = "|".join(re.escape(os.strerror(number)) for number in sorted(OWN_ERRORS))
_LOCAL = re.compile(
    rf"\S+: (?:Failed to create socket|Connect to \S+ failed): (?:{_OWN})"
    rf"|\S+: Connect to ipv4\S+ failed: {os.strerror(errno.EADDRNOTAVAIL)}"
)
"""librdkafka's message for a failed connect has no number of the error.  It begins with the
server's name, which cannot have a space: names with one are not resolved."""


def is_local(error: KafkaError) -> bool:
    """Whether this process lacks resources for a connection, whatever the server is."""
    if error.code() == KafkaError._CRIT_SYS_RESOURCE:
        return True
    return error.code() == KafkaError._TRANSPORT and _LOCAL.match(error.str()) is not None


def describe(error: KafkaError) -> str:
    """Return the broker's words and the name of the error."""
    return one_line(f"{error.str()} ({error.name()})")


CLIENT_ERRORS = (KafkaException, SystemError)
"""What the client library raises.  After a fatal error it still runs the callbacks that wait, and
Python reports that each of them ran with an exception set: a SystemError with the real cause."""


def error_of(exception: BaseException) -> KafkaError:
    """Return the error of an exception of the client library."""
    if isinstance(exception, SystemError) and exception.__cause__ is not None:
        return error_of(exception.__cause__)
    error = exception.args[0] if exception.args else exception
    if isinstance(error, KafkaError):
        return error
    return KafkaError(KafkaError._FAIL, str(error))


def stop_before_sending(error: KafkaError) -> Stop:
    """Classify an error after which nothing of the append was sent."""
    if error.code() in MISCONFIGURED:
        return Stop(StopKind.MISCONFIGURED, describe(error))
    kind = StopKind.LOCAL if is_local(error) else StopKind.UNAVAILABLE
    return Stop(kind, describe(error))


def stop_without_client(error: Exception) -> Stop:
    """Classify why a client of the library could not be made."""
    # RuntimeError: no thread could be started.
    if is_own_failure(error) or type(error) is RuntimeError:
        return Stop(StopKind.LOCAL, one_line(str(error) or "out of memory"))
    found = error_of(error)
    return Stop(StopKind.LOCAL if is_local(found) else StopKind.MISCONFIGURED, describe(found))


class Troubles:
    """The last errors of a client's connections, which say why it got no response.

    librdkafka reports them to a callback, retries, and lets the call time out.
    """

    def __init__(self) -> None:
        self._last: KafkaError | None = None
        self._local_at: float | None = None
        """When the last error was one of this process; None: it was not."""
        self.are_local = True
        """Whether the client has never got further than to errors of this process."""
        self._definite: KafkaError | None = None

    def report(self, error: KafkaError) -> None:
        """Take an error; called in a thread of the client."""
        if error.code() in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._GAPLESS_GUARANTEE):
            return
        if error.code() in MISCONFIGURED:
            self._definite = error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._last = self._last or error
        else:
            self._last = error
            self._local_at = time.monotonic() if is_local(error) else None
            self.are_local &= self._local_at is not None

    def is_local(self, waited_s: float) -> bool:
        """Whether the last error is one of this process, and of the time that was waited.

        librdkafka may report it later: then no socket can be opened here, either.
        """
        at = self._local_at
        return (at is not None and time.monotonic() - at <= waited_s) or lacks_descriptors()

    def stop(self, otherwise: KafkaError | None, waited_s: float) -> Stop:
        """Classify a call that got no response and sent nothing."""
        if self._definite is not None:
            return Stop(StopKind.MISCONFIGURED, describe(self._definite))
        error = self._last or otherwise
        if self.is_local(waited_s):
            what = "no descriptor is left" if error is None else describe(error)
            return Stop(StopKind.LOCAL, what)
        if error is not None and is_local(error):
            error = otherwise  # Of an earlier call.
        if error is None or error.code() == KafkaError._TIMED_OUT:
            return Stop(StopKind.UNAVAILABLE, f"no response within {waited_s:g} s")
        return stop_before_sending(error)

    def suffix(self) -> str:
        """Return the last error, as an addition to another message."""
        error = self._definite or self._last
        return "" if error is None else f"; {describe(error)}"
