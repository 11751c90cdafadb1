"""The import: translates all records, and adds the endpoints like `outbox apply`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

from outbox.core.model.endpoint_config import parse_file
from outbox.core.model.text import quoted
from outbox.destinations.endpoint_validation import check_declared
from outbox.errors import NotFound, UsageError
from outbox.operations.endpoints.apply import apply_file
from outbox.operations.endpoints.live_secrets import stored_secret
from outbox.store.connection.secrets import CLEAR
from outbox_adopt.peers.document import SOURCES
from outbox_adopt.peers.translation import NotImported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.model.endpoint_config import DeclaredEndpoint
    from outbox.network.egress import EgressPolicy
    from outbox.store.connection.secrets import Vault
    from outbox_adopt.peers.record import Record
    from outbox_adopt.peers.translation import ImportOptions, Translation

ImportAction = Literal["add", "change", "keep", "not imported"]


@dataclass(frozen=True, slots=True)
class ImportedEndpoint:
    """What became of a record."""

    place: str
    """Where it is in the file."""
    name: str | None
    """Its name here; None: it has none, because it was not imported."""
    action: ImportAction
    notes: tuple[str, ...]
    """What could not be carried over; why it was not imported."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import, or of its dry run."""

    dry_run: bool
    imported: int
    """Endpoints that are there now, those that were before included."""
    not_imported: int
    endpoints: tuple[ImportedEndpoint, ...]


async def import_endpoints(
    connection: Connection[Any],
    schema: str,
    records: Sequence[Record],
    options: ImportOptions,
    *,
    policy: EgressPolicy,
    actor: str,
    dry_run: bool = False,
    vault: Vault = CLEAR,
) -> ImportReport:
    """Add another sender's endpoints: all that have a counterpart here, or none.

    Those that are here by these names get the settings of the file.  Secrets are not shown: those
    that are in the file are known, and of others `outbox endpoint rotate-secret` prints one.

    Raises:
        UsageError: a record is not as it should be; nothing was changed.
        Locked, SchemaMissing, DatabaseUnavailable, CannotRun: as in `apply_file`.
    """
    translated, declared = translate_all(records, options, policy)
    report = await apply_file(
        connection, schema, declared, actor=actor, dry_run=dry_run, vault=vault
    )
    steps = {step.name: step for step in report.endpoints}
    endpoints = []
    for each in translated:
        if each.name is not None and (step := steps.get(each.name)) is not None:
            assert step.action != "remove"
            endpoints.append(replace(each, action=step.action))
        else:
            endpoints.append(each)
    refused = sum(each.action == "not imported" for each in endpoints)
    return ImportReport(dry_run, len(endpoints) - refused, refused, tuple(endpoints))


def translate_all(
    records: Sequence[Record], options: ImportOptions, policy: EgressPolicy
) -> tuple[list[ImportedEndpoint], list[DeclaredEndpoint]]:
    """What becomes of each record, and the endpoints of those that have a counterpart here.

    Raises:
        UsageError: a record is not as it should be.
        NotFound: the file has none of a name that is wanted.
    """
    results: list[ImportedEndpoint] = []
    missing = set(options.only)
    declared: list[DeclaredEndpoint] = []
    names: Counter[str] = Counter()
    for record in records:
        try:
            made = SOURCES[record.required("source")].translate(record, options)
            _make_unique(made, names)
            missing.discard(made.name)
            if options.only and made.name not in options.only:
                continue
            if options.to is not None:
                made.values |= _sent_to(options.to, made.name)
            endpoint = _declare(made.values, policy)
        except NotImported as reason:
            results.append(ImportedEndpoint(record.place, None, "not imported", (str(reason),)))
            continue
        declared.append(replace(endpoint, place=record.place))
        name = endpoint.settings.name
        results.append(ImportedEndpoint(record.place, name, "add", tuple(made.notes)))
    if missing:
        raise NotFound(f"no endpoint of the file has the name {quoted(min(missing))}")
    return results, declared


def _sent_to(url: str, name: str) -> dict[str, Any]:
    """Settings with which an endpoint sends to a recorder, which may be in a private network."""
    values: dict[str, Any] = {"url": f"{url.rstrip('/')}/{quote(name, safe='')}"}
    with suppress(ValueError):
        host = ip_address(urlsplit(url).hostname or "")
        if not host.is_global:
            values["allow_networks"] = [str(host)]
    return values


def _make_unique(made: Translation, names: Counter[str]) -> None:
    """Number the endpoints of one name, which is unique here."""
    name = made.name
    names[name] += 1
    if names[name] > 1:
        made.values["name"] = f"{name}-{names[name]}"


def _declare(values: Mapping[str, Any], policy: EgressPolicy) -> DeclaredEndpoint:
    """An endpoint with valid settings.

    Raises:
        NotImported: a setting is not possible here, such as a URL in a private network.
    """
    try:
        (endpoint,) = parse_file({"endpoints": [values]})
        check_declared([endpoint], policy)
        if endpoint.secret is not None:
            stored_secret(endpoint.secret, endpoint.settings.url)
    except UsageError as error:
        raise NotImported(str(error).removeprefix("endpoints[0].")) from None
    return endpoint
