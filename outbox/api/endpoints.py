"""/v1/endpoints: destinations, and everything that is done with them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

from pydantic import Field
from yarl import URL

from outbox.api import tenancy
from outbox.api.rate_limit import too_many
from outbox.api.redaction import teller
from outbox.api.request_parsing import NoQuery, Paging, Seconds
from outbox.api.route import Call, For, Later, Model, Page, PageOf, Reply, Route, Shown, paged
from outbox.core.model import endpoint_config
from outbox.destinations.http.endpoint_validation import (
    aside,
    check_way,
    policy_of,
    why_not_trusted,
)
from outbox.destinations.http.test_deliveries import RETRY_S, TRIAL_S, TooMany
from outbox.destinations.http.tls import check_identity
from outbox.errors import Conflict, UsageError
from outbox.operations import (
    endpoint_changes,
    endpoint_removal,
    endpoint_secrets,
    endpoint_states,
    endpoints,
)
from outbox.operations.endpoint_certificate import Identity, set_identity
from outbox.operations.endpoint_removal import Removal
from outbox.operations.endpoint_secrets import OVERLAP_S, Rotation
from outbox.operations.endpoint_states import Change
from outbox.operations.endpoints import EndpointRow, Hand, Health, LaneRow, SecretRow
from outbox.operations.views import endpoints as views
from outbox.store import endpoints as destinations
from outbox.store.connection.secrets import Vault

NAME = "/v1/endpoints/{name}"
TEST_TIMEOUT_S = TRIAL_S + 10.0


class EndpointBody(Model):
    """Settings by the names that files have for them; what is null is the default."""

    flags = endpoint_config.FLAGS

    name: str | None = None
    """Of a tenant's token it begins with the tenant's: acme.shop."""
    url: str | None = None
    types: tuple[str, ...] | None = None
    """Patterns; none: everything but outbox.*."""
    tenant: str | None = None
    all_tenants: bool | None = None
    filter: str | None = None
    """An SQL/JSON path condition on the payload."""
    method: str | None = None
    headers: dict[str, str | None] | None = None
    """A header that is null keeps the value that it has."""
    connect_timeout: float | str | None = None
    timeout: float | str | None = None
    in_flight_max: int | None = None
    """So many requests at once, over all lanes."""
    rate: float | None = None
    """So many requests begun in a second."""
    batch_max: int | None = None
    """So many deliveries of a lane in one request, as a JSON array."""
    allow_networks: tuple[str, ...] | None = None
    """Private networks that it may be in; not for a tenant's token."""
    ca: str | None = None
    """Certificates (PEM) to trust instead of the system's authorities."""
    retry: str | dict[str, Any] | None = None
    """A policy such as patient, or values such as {"preset": "plane", "attempts": 8}."""
    retryable: tuple[str | int, ...] | None = None
    on_dead_letter: str | None = None
    backlog_max: int | None = None
    backlog_age: float | str | None = None
    disable_after: float | str | None = None
    checkpoint_every: float | str | None = None
    """So often its receiver is told the last number of each lane."""
    lanes: int | None = None

    def said(self) -> dict[str, Any]:
        """What was said, null or not, as a file has it."""
        values = self.model_dump(exclude_unset=True)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


class NewEndpointBody(EndpointBody):
    """Settings of a new endpoint, and how it is signed for."""

    ed25519: bool = False
    """Sign with a private key, and show the receiver's public one, instead of a secret."""


class RemovalQuery(Model):
    give_up: bool = False
    """Never send what it is owed."""
    drain: bool = False
    """Give it nothing new, and remove it when all is sent: ask again until it is gone."""


class CertificateBody(Model):
    """What the relay shows to an endpoint's receiver."""

    pem: str
    """The certificate, what stands between it and the receiver's authority, and its key."""


class Why(Model):
    """What for; kept with the change, and in the journal."""

    why: str | None = None


class RotationBody(Model):
    """What becomes of the secret that there is."""

    overlap: Seconds = Field(default=OVERLAP_S, ge=0)
    """The old secret signs beside the new one for so long; 0: no longer."""
    ed25519: bool | None = None
    """A private key, of which the receiver is given the public one, or not; null: as before."""


class Added(Shown):
    """A new endpoint, with its signing secret, which is shown this once, or its public key."""

    id: UUID
    name: str
    url: str
    secret: str
    lanes: int


class Updated(Shown):
    """What was changed."""

    id: UUID
    name: str
    changed: dict[str, list[str]]
    """Each setting with its old and its new value."""


class Detail(Shown):
    """Everything about an endpoint."""

    endpoint: EndpointRow
    settings: dict[str, Any]
    """By the names that files have for them; headers are without their values."""
    health: Health
    secrets: tuple[SecretRow, ...]
    certificate: dict[str, Any] | None
    """What its receiver is shown: subject, the end of its time, fingerprint."""
    lanes: tuple[LaneRow, ...]
    hands: tuple[Hand, ...]
    """The last relays that it went through; a tenant is not told."""


class StillOwed(Shown):
    """An endpoint that is not removed yet, because it is owed something."""

    id: UUID
    name: str
    state: str
    owed: int
    blocked: int
    """Lanes that wait for an operator."""


class Trial(Shown):
    """What came of a test delivery."""

    endpoint: str
    url: str
    outcome: str
    """What the relay would make of the answer: delivered, retried, dead_letter or disabled."""
    version: int
    elapsed_ms: float
    status: int | None = None
    failure: str | None = None
    detail: str | None = None
    headers: dict[str, str] | None = None
    body: str | None = None


async def _list(call: Call[Paging, None]) -> Page:
    limit = call.query.limit
    rows = await endpoints.page(
        call.db, call.schema, tenant=call.tenant, limit=limit + 1, after=call.query.after
    )
    to = await teller(call)
    return paged([to.endpoint(row) for row in rows], limit, lambda row: row.name)


async def _add(call: Call[NoQuery, NewEndpointBody]) -> Reply:
    said = call.body.said()
    said["tenant"] = tenancy.forced(call.tenant, said.get("tenant"))
    for name in ("name", "url"):
        if said.get(name) is None:
            raise UsageError(f"{name}: is missing")
    ed25519 = said.pop("ed25519", False)
    wanted = endpoint_config.one(said)
    _hold_to_tenant(call, wanted)
    tenancy.require_name(call.tenant, wanted.name)
    check_way(wanted, policy_of(call.settings))
    if (wrong := await aside(why_not_trusted, wanted.ca)) is not None:
        raise wrong
    made = await endpoint_changes.add(
        call.db, call.schema, wanted, actor=call.actor, vault=_vault(call), ed25519=ed25519
    )
    return Reply(views.added(made), 201)


async def _show(call: Call[NoQuery, None]) -> dict[str, Any]:
    found = await endpoints.get(call.db, call.schema, call.path["name"])
    return views.detail((await teller(call)).detail(found))


async def _update(call: Call[NoQuery, EndpointBody]) -> dict[str, Any]:
    said = call.body.said()
    for name in ("name", "url"):
        if name in said and said[name] is None:
            raise UsageError(f"{name}: must be a text")
    # Now, because a lock is held while it is edited.
    wrong = await aside(why_not_trusted, call.body.ca)

    def edit(there: Any) -> Any:
        wanted = endpoint_config.one(said, there)
        _hold_to_tenant(call, wanted, there)
        if call.tenant is not None and _origin(wanted.url) != _origin(there.url):
            _hold_to_given(wanted, said.get("headers"))
        check_way(wanted, policy_of(call.settings), there)
        if wrong is not None and wanted.ca != there.ca:
            raise wrong
        if wanted.name != there.name:
            tenancy.require_name(call.tenant, wanted.name)
        return wanted

    done = await endpoint_changes.update(
        call.db, call.schema, call.path["name"], edit, actor=call.actor, vault=_vault(call)
    )
    return views.updated(done)


async def _remove(call: Call[RemovalQuery, None]) -> Any:
    name, query = call.path["name"], call.query
    if query.drain and query.give_up:
        raise UsageError("say one of give_up and drain, not both")
    if query.drain:
        endpoint_id = await endpoint_removal.drain(call.db, call.schema, name, actor=call.actor)
        left = await endpoint_removal.waiting(call.db, call.schema, endpoint_id)
        if left.owed and left.state != "removing":
            told = {"id": endpoint_id, "name": name, "state": left.state}
            return Reply({**told, "owed": left.owed, "blocked": left.blocked}, 202)
    try:
        return await endpoint_removal.remove(
            call.db, call.schema, name, actor=call.actor, give_up=query.give_up
        )
    except endpoint_removal.StillOwed as still:
        raise Conflict(f"{still} (drain, or give_up)") from None


async def _pause(call: Call[NoQuery, Why]) -> Change:
    (change,) = await endpoint_states.pause(
        call.db, call.schema, [call.path["name"]], actor=call.actor, why=call.body.why
    )
    return change


async def _resume(call: Call[NoQuery, Why]) -> Change:
    (change,) = await endpoint_states.resume(
        call.db, call.schema, [call.path["name"]], actor=call.actor, why=call.body.why
    )
    return change


async def _enable(call: Call[NoQuery, Why]) -> Change:
    return await endpoint_states.enable(
        call.db, call.schema, call.path["name"], actor=call.actor, why=call.body.why
    )


async def _rotate(call: Call[NoQuery, RotationBody]) -> Rotation:
    return await endpoint_secrets.rotate_secret(
        call.db,
        call.schema,
        call.path["name"],
        actor=call.actor,
        overlap_s=call.body.overlap,
        vault=_vault(call),
        ed25519=call.body.ed25519,
    )


async def _set_certificate(call: Call[NoQuery, CertificateBody]) -> Identity:
    about = asdict(await aside(check_identity, call.body.pem))
    return await set_identity(
        call.db,
        call.schema,
        call.path["name"],
        call.body.pem,
        about,
        actor=call.actor,
        vault=_vault(call),
    )


async def _remove_certificate(call: Call[NoQuery, None]) -> Identity:
    return await set_identity(call.db, call.schema, call.path["name"], None, None, actor=call.actor)


async def _test(call: Call[NoQuery, None]) -> Later:
    endpoint = await destinations.find(call.db, call.schema, call.path["name"], _vault(call))
    to = await teller(call)

    async def go() -> dict[str, Any]:
        try:
            came = await call.trials.attempt(endpoint, call.tenant)
        except TooMany as error:
            raise too_many(str(error), RETRY_S) from None
        return came.as_json(to.answer(came.summary))

    return Later(go)


def _hold_to_given(wanted: Any, given: dict[str, Any] | None) -> None:
    """Keep headers that somebody else may have set from being sent somewhere else.

    Raises:
        UsageError: one of them would stay without being said again.
    """
    said = {name.lower() for name, value in (given or {}).items() if value is not None}
    for name in wanted.headers:
        if name.lower() not in said:
            raise UsageError(
                f"url: another host would be sent the header {name}, which is not shown; say "
                "headers with it: their values anew, or {} for none"
            )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = URL(url)
    return parts.scheme, parts.host, parts.port


def _vault(call: Call[Any, Any]) -> Vault:
    return Vault.of(call.settings)


def _hold_to_tenant(call: Call[Any, Any], wanted: Any, there: Any = None) -> None:
    """Keep a tenant's endpoints the tenant's, and out of networks that are not its own.

    Raises:
        UsageError: it would be for another one, for all, or for none; or it would go
            somewhere else in a network that an operator opened for where it goes.
    """
    if call.tenant is None:
        return
    if wanted.tenant != call.tenant:
        raise UsageError(f'tenant: this token is for "{call.tenant}" alone; leave it out')
    if wanted.allow_networks != (() if there is None else there.allow_networks):
        raise UsageError("allow_networks: only an operator opens a network, and no tenant's token")
    if wanted.allow_networks and wanted.url != there.url:
        raise UsageError(
            "url: an operator opened a private network for the one that it has; ask for another"
        )


def _action(name: str, summary: str, handler: Any, answer: Any, body: Any = Why) -> Route:
    return Route(
        method="POST",
        path=f"{NAME}/{name}",
        summary=summary,
        handler=handler,
        scope="operate",
        tenants=For.ENDPOINT,
        body=body,
        body_required=False,
        answers={200: answer},
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/endpoints",
        summary="Endpoints by name",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=Paging,
        answers={200: PageOf(EndpointRow)},
    ),
    Route(
        method="POST",
        path="/v1/endpoints",
        summary="Add an endpoint; shows its signing secret, this once",
        handler=_add,
        scope="operate",
        tenants=For.NARROWED,
        body=NewEndpointBody,
        answers={201: Added},
    ),
    Route(
        method="GET",
        path=NAME,
        summary="An endpoint, its health and its lanes",
        handler=_show,
        scope="read",
        tenants=For.ENDPOINT,
        answers={200: Detail},
    ),
    Route(
        method="PATCH",
        path=NAME,
        summary="Change an endpoint; what is not said stays, what is null is the default again",
        handler=_update,
        scope="operate",
        tenants=For.ENDPOINT,
        body=EndpointBody,
        answers={200: Updated},
    ),
    Route(
        method="DELETE",
        path=NAME,
        summary="Remove an endpoint; 409 while it is owed something and nobody said what then",
        handler=_remove,
        scope="operate",
        tenants=For.ENDPOINT,
        query=RemovalQuery,
        answers={200: Removal, 202: StillOwed},
    ),
    _action("pause", "Send nothing until it is resumed", _pause, Change),
    _action("resume", "Send again, at once if it is failing; blocked lanes go on", _resume, Change),
    _action("enable", "Let a disabled endpoint receive again, from now on", _enable, Change),
    _action(
        "rotate-secret", "A new signing secret, shown this once", _rotate, Rotation, RotationBody
    ),
    Route(
        method="PUT",
        path=f"{NAME}/certificate",
        summary="Show its receiver a certificate (mutual TLS); it is not shown here again",
        handler=_set_certificate,
        scope="operate",
        tenants=For.ENDPOINT,
        body=CertificateBody,
        answers={200: Identity},
    ),
    Route(
        method="DELETE",
        path=f"{NAME}/certificate",
        summary="Show its receiver no certificate any more",
        handler=_remove_certificate,
        scope="operate",
        tenants=For.ENDPOINT,
        answers={200: Identity},
    ),
    Route(
        method="POST",
        path=f"{NAME}/test",
        summary="Send one signed test delivery, now and from here",
        handler=_test,
        scope="operate",
        tenants=For.ENDPOINT,
        timeout_s=TEST_TIMEOUT_S,
        answers={200: Trial},
    ),
)
