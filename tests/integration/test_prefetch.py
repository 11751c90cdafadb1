"""Prefetching: a request built during the previous one equals a request built now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.cluster.observed_time import Odometer
from outbox.core.delivery.circuit_breaker import BreakerRecord
from outbox.core.delivery.commands import ErasedEvent, Fetch, Progress, Record, Send
from outbox.core.delivery.connection_reuse import ConnectionReuse
from outbox.core.delivery.endpoint import Endpoint
from outbox.core.delivery.operational_events import ReportedState
from outbox.core.messages.message import prepare
from outbox.core.messages.signature import parse_secret
from outbox.core.model.headers import NO_HEADERS, EndpointHeaders
from outbox.core.model.message_format import FormatName, MessageFormat
from outbox.core.model.response import AttemptResult
from outbox.core.model.response_policy import RETRYABLE, AttemptOutcome
from outbox.core.model.retry_policy import RetryPolicy
from outbox.destinations.http.request import signed_request
from outbox.relay.delivery.owned_endpoints import EndpointRuntime
from outbox.relay.delivery.request_cache import RequestCache
from outbox.store.delivery.lanes import LoadedLane
from outbox.telemetry.meters import Meters
from tests.core.lane_tables import ENDPOINT, EPOCH_S, delivery

if TYPE_CHECKING:
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.redaction import SecretRedactor
    from outbox.destinations.interface import Request

POLICY = RetryPolicy(base_s=0.1, factor=1.0, cap_s=0.1, attempts_max=3)
LAST_SEQ = 12
SECRETS = [parse_secret(f"whsec_{'ABCDEFGH'[n] * 43}=") for n in range(4)]

Event = Literal[
    "delivered", "refused", "failed", "second", "header", "format", "secret", "erased", "settings",
    "ended", "unsolicited",
]  # fmt: skip
"""An event during a request; the first three end it."""


def endpoint() -> Endpoint:
    return Endpoint(
        id=ENDPOINT, name="shop", tenant=None, state="active", url="http://shop.test/",
        method="POST", headers=NO_HEADERS, secrets=((SECRETS[0], None),),
        connect_timeout_s=5.0, timeout_s=15.0,
        in_flight_max=None, rate_per_s=None, batch_max=None, networks=(),
        ca=None, identity=None, retry=POLICY, retryable=RETRYABLE, blocks=False,
        backlog_max=None, backlog_age_s=None, disable_after_s=1e6,
        generation=1, resumes=0, applied_resumes=0, health=BreakerRecord(),
        reported=ReportedState(), reuse=ConnectionReuse(),
    )  # fmt: skip


class Owner:
    """Drives one lane like the dispatcher, and prefetches whenever possible."""

    def __init__(self) -> None:
        self.now = EPOCH_S
        line = RequestScheduler(8).add_endpoint(None, None, None)
        self.home = EndpointRuntime(
            endpoint(), 1, self.now, Meters().acquire("shop"), line, Odometer()
        )
        loaded = LoadedLane(
            1, LAST_SEQ, Progress(), pending_since=self.now,
            endpoint_id=ENDPOINT, name="lane", generation=1,
        )  # fmt: skip
        (self.lane,) = self.home.add_lanes([loaded], 0, self.now)
        self.erased: set[int] = set()
        self.taken_ahead = 0

    def prefetch(self) -> None:
        self.lane.prefetch_next(self.now, self.home.reuse.is_allowed(self.now))

    def send(self) -> Send | None:
        """The next request; all other commands of the lane are executed."""
        machine = self.lane.state
        while (step := machine.next(self.now)) is not None:
            match step:
                case Send():
                    return step
                case Fetch(after_seq=after):
                    machine.append_fetched(
                        [self._row(seq) for seq in range(after + 1, LAST_SEQ + 1)]
                    )
                case Record():
                    machine.confirm_recorded(step)
                case _:
                    self.now = step.until
        return None

    def _row(self, seq: int) -> Delivery | ErasedEvent:
        row = delivery(seq)
        gone = ErasedEvent(row.endpoint_id, row.seq, row.batch, row.outbox_id)
        return gone if seq in self.erased else row

    def check(self, send: Send) -> None:
        """The request equals one that is built without prefetching."""
        to, ahead = self.home.endpoint, self.lane.requests.prepared
        fresh = prepare(
            send.delivery,
            send.previous_seq,
            lane_ends=send.lane_ends,
            headers=to.headers,
            message_format=to.message_format,
        )
        keys = to.secrets_at(self.now)
        reused = self.home.reuse.is_allowed(self.now)
        built = self.lane.requests.build(send, self.now, keep_alive=reused)
        assert built == signed_request(
            self.home.recipient, fresh, send.attempt, int(self.now), keys, keep_alive=reused
        )
        self.taken_ahead += ahead is not None and built is ahead.request

    def happens(self, event: Event, n: int) -> bool:
        """Apply the event; whether it ends the request."""
        home, machine = self.home, self.lane.state
        match event:
            case "second":
                self.now += 1
            case "header":
                headers = EndpointHeaders((("X-Count", str(n)),))
                self._change(replace(home.endpoint, headers=headers))
            case "format":
                message_format = MessageFormat(get_args(FormatName)[n % 5])
                self._change(replace(home.endpoint, message_format=message_format))
            case "secret":
                (old, _), *_ = home.endpoint.secrets
                new = SECRETS[n % len(SECRETS)]
                secrets = ((new, None), (old, self.now + 0.055))
                self._change(replace(home.endpoint, secrets=secrets))
            case "settings":
                self._change(replace(home.endpoint, url=f"http://shop.test/{n}"))
            case "erased":
                self.erased.add(machine.acked_seq + 2)
                machine.invalidate_buffer()
            case "ended":
                machine.mark_ended()
            case "unsolicited":
                self.home.reuse = self.home.reuse.record_unsolicited(self.now)
            case _:
                self._complete_request(event)
                return True
        return False

    def _change(self, to: Endpoint) -> None:
        self.home.apply_settings(to, self.now)

    def _complete_request(self, event: Event) -> None:
        machine = self.lane.state
        status, outcome = {
            "delivered": (204, AttemptOutcome.DELIVERED),
            "refused": (400, AttemptOutcome.REFUSED),
        }.get(event, (503, AttemptOutcome.RETRY))
        self.now += 0.01
        record = machine.record_result(
            outcome,
            AttemptResult.completed(status, 0.01),
            POLICY,
            started_at=self.now - 0.01,
            now=self.now,
            u=0.5,
        )
        machine.confirm_recorded(record)


def drive(events: list[Event]) -> Owner:
    """Run all events, then send what is left."""
    owner = Owner()
    script = iter([*events, *["delivered"] * (3 * LAST_SEQ)])
    n = 0
    while (send := owner.send()) is not None:
        owner.check(send)
        owner.prefetch()
        while not owner.happens(next(script), n):
            n += 1
            owner.prefetch()
    assert owner.lane.state.drained
    return owner


@given(st.lists(st.sampled_from(get_args(Event)), max_size=30))
@example(["refused"])
@example(["second"])
@example(["header"])
@example(["secret", *["delivered"] * LAST_SEQ])
@example(["erased", "delivered", "delivered"])
@example([*["delivered"] * (LAST_SEQ - 2), "ended"])
def test_a_prefetched_request_equals_a_newly_built_one(events: list[Event]) -> None:
    drive(events)


def test_every_request_but_the_first_is_prefetched() -> None:
    assert drive([]).taken_ahead == LAST_SEQ - 1


@pytest.mark.parametrize("event", ["refused", "second", "secret", "ended"])
def test_the_check_detects_a_stale_prefetched_request(
    monkeypatch: pytest.MonkeyPatch, event: Event
) -> None:
    """An implementation that uses it anyway is detected."""

    def build(
        requests: RequestCache, send: Send, started_at: float, *, keep_alive: bool
    ) -> Request:
        ahead = requests.prepared
        if ahead is not None and ahead.send.delivery is send.delivery:
            return ahead.request
        return genuine(requests, send, started_at, keep_alive=keep_alive)

    genuine = RequestCache.build
    monkeypatch.setattr(RequestCache, "build", build)
    monkeypatch.setattr(
        EndpointRuntime, "apply_settings", lambda home, to, _: setattr(home, "endpoint", to)
    )
    many: list[Event] = ["delivered"] * (LAST_SEQ - 2)
    with pytest.raises(AssertionError):
        drive([*(many if event == "ended" else []), event, *many])


def test_responses_are_redacted_by_the_current_header_values() -> None:
    runtime = Owner().home
    assert runtime.redactor is None

    def apply(name: str, *values: str) -> SecretRedactor | None:
        headers = tuple((f"X-{n}", value) for n, value in enumerate(values))
        runtime.apply_settings(
            replace(endpoint(), name=name, headers=EndpointHeaders(headers)), EPOCH_S
        )
        return runtime.redactor

    def redacted(value: str) -> bytes:
        assert runtime.redactor is not None
        response = AttemptResult.completed(401, 0.001, body=value.encode())
        return runtime.redactor.redact(response).body

    first = apply("a", "secret-1")
    assert apply("b", "secret-1") is first  # Its forms are kept.
    assert redacted("secret-1") == b"(not kept)"
    apply("b", "secret-2")
    assert (redacted("secret-1"), redacted("secret-2")) == (b"secret-1", b"(not kept)")
    assert apply("b") is None
