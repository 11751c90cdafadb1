"""A request run on the event loop: builds the requests that `RequestRun` decides on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.stored_response import stored_success

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.delivery.commands import Successes
    from outbox.core.delivery.request_run import RequestRun
    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request
    from outbox.relay.delivery.fetcher import DeliveryFetcher
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.telemetry.tracing import AttemptSpan


class LaneRun:
    """A `Following` of one lane: the transport sends what it returns.

    Args:
        span: the span of the first request.
        loop_time: the clock of admission control.
        now: epoch seconds.
    """

    __slots__ = (
        "_body",
        "_endpoint",
        "_fetcher",
        "_headers",
        "_is_full",
        "_lane",
        "_loop_time",
        "_now",
        "_recorder",
        "_redactor",
        "_reuse",
        "_stored",
        "_telemetry",
        "run",
        "span",
    )

    def __init__(
        self,
        lane: LaneRuntime,
        run: RequestRun,
        span: AttemptSpan | None,
        fetcher: DeliveryFetcher,
        recorder: Recorder,
        telemetry: DeliveryTelemetry,
        loop_time: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.run = run
        """It knows the request in flight, or the last one."""
        self.span = span
        """The span of the request in flight."""
        self._lane = lane
        self._endpoint = lane.runtime.endpoint
        self._redactor = lane.runtime.redactor
        # It allowed the first request on a connection that is reused.
        self._reuse = lane.runtime.reuse
        self._fetcher = fetcher
        self._recorder = recorder
        self._telemetry = telemetry
        self._loop_time = loop_time
        self._now = now
        # The last response in its stored form; receivers repeat the same one.
        self._headers: object = None
        self._body: object = None
        self._stored: dict[str, Any] | None = None
        # Whether the lane must wait for the recorder.  It is asked when it gets results of the run.
        self._is_full = False

    def follow(self, response: AttemptResult) -> Request | None:
        """See `Following.follow`."""
        lane, run = self._lane, self.run
        runtime = lane.runtime
        if runtime.endpoint is not self._endpoint or self._is_full:
            return None
        if response.headers is not self._headers or response.body is not self._body:
            self._headers, self._body = response.headers, response.body
            redacted = response if self._redactor is None else self._redactor.redact(response)
            kept = self._endpoint.kept_response(redacted, AttemptOutcome.DELIVERED)
            self._stored = stored_success(kept)
        now, done = self._now(), run.send
        requests = lane.requests
        known = None if requests.prepared is None else requests.prepared.send
        send = run.advance(
            response, self._stored, known, now=now, admission_now=self._loop_time(),
            may_reuse=runtime.reuse is self._reuse or runtime.reuse.is_allowed(now),
        )  # fmt: skip
        if send is None:
            return None
        if requests.signed_by is not None:
            runtime.signing.record(requests.signed_by, response)
        request, telemetry = requests.build(send, now, keep_alive=True), self._telemetry
        if telemetry.tracing is not None:
            if self.span is not None:
                telemetry.run_attempt_traced(lane, done.delivery, run, response, self.span)
            request, self.span = telemetry.attempt_started(lane, send, request, now)
        return request

    def sent(self) -> None:
        """See `Following.sent`."""
        lane, now = self._lane, self.run.started_at
        self._fetcher.refill(lane)
        lane.prefetch_next(now, keep_alive=True)
        if (due := self.run.pop_due(now)) is not None:
            self._record(due)

    def record_rest(self) -> None:
        """Record the successes that are left when the run has ended."""
        if self.run.results:
            self._record(self.run.results)

    def _record(self, results: Successes) -> None:
        self._recorder.add(self._lane.state, self._lane.runtime.epoch, results)
        self._is_full = self._recorder.is_full(self._lane.state)
        self._telemetry.run_delivered(self._lane, results)
