"""What errors of Kafka and librdkafka mean for an append."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import one_line

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
    return Stop(StopKind.UNAVAILABLE, describe(error))


class Troubles:
    """The last errors of a client's connections, which say why it got no response.

    librdkafka reports them to a callback, retries, and lets the call time out.
    """

    def __init__(self) -> None:
        self._last: KafkaError | None = None
        self._definite: KafkaError | None = None

    def report(self, error: KafkaError) -> None:
        """Take an error; called in a thread of the client."""
        if error.code() in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._GAPLESS_GUARANTEE):
            return
        if error.code() in MISCONFIGURED:
            self._definite = error
        elif error.code() != KafkaError._ALL_BROKERS_DOWN or self._last is None:
            self._last = error

    def stop(self, otherwise: KafkaError | None, waited_s: float) -> Stop:
        """Classify a call that got no response and sent nothing."""
        if self._definite is not None:
            return Stop(StopKind.MISCONFIGURED, describe(self._definite))
        error = self._last or otherwise
        if error is None or error.code() == KafkaError._TIMED_OUT:
            return Stop(StopKind.UNAVAILABLE, f"no response within {waited_s:g} s")
        return stop_before_sending(error)

    def suffix(self) -> str:
        """Return the last error, as an addition to another message."""
        error = self._definite or self._last
        return "" if error is None else f"; {describe(error)}"
