"""The import: translates all records, and adds the endpoints like `outbox apply`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

from outbox.core.model.compat import format_until
from outbox.core.model.endpoint_config import parse_file, to_file_values
from outbox.core.model.text import closest, count, quoted
from outbox.destinations.endpoint_validation import check_declared
from outbox.errors import NotFound, UsageError
from outbox.operations.endpoints.apply import apply_file
from outbox.operations.endpoints.found import FIND_ENDPOINTS, FoundEndpoint
from outbox.operations.endpoints.live_secrets import stored_secret
from outbox.operations.lanes import PENDING
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import CLEAR
from outbox_adopt.peers.translation import NotImported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.model.endpoint_config import DeclaredEndpoint
    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.network.egress import EgressPolicy
    from outbox.operations.endpoints.apply import ApplyReport
    from outbox.store.connection.secrets import Vault
    from outbox_adopt.peers.document import SourcedRecord
    from outbox_adopt.peers.translation import ImportOptions, Translation

READ_PENDING = f"""
SELECT e.name, {PENDING} AS pending FROM endpoint e
 WHERE e.name = ANY ($1) AND e.state <> 'removed'
"""

ImportAction = Literal["add", "change", "keep", "not imported"]


@dataclass(frozen=True, slots=True)
class ImportedEndpoint:
    """What became of a record."""

    place: str
    """Where it is in the file."""
    name: str
    action: ImportAction
    notes: tuple[str, ...] = ()
    """What could not be carried over; why it was not imported."""
    begins_disabled: tuple[str, ...] = ()
    """Why an endpoint that is added begins disabled, and what to do before it is enabled."""
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Old and new value by setting, of one that is there."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import, or of its dry run, in endpoints."""

    dry_run: bool
    added: int
    changed: int
    kept: int
    not_imported: int
    endpoints: tuple[ImportedEndpoint, ...]


async def import_endpoints(
    connection: Connection[Any],
    schema: str,
    records: Sequence[SourcedRecord],
    options: ImportOptions,
    *,
    policy: EgressPolicy,
    actor: str,
    dry_run: bool = False,
    vault: Vault = CLEAR,
) -> ImportReport:
    """Add another sender's endpoints: all that have a counterpart here, or none.

    One that is here by its name gets what its record says; what that does not say stays.  Secrets
    are not shown: those of the file are known, and of others `outbox endpoint rotate-secret` prints
    one.

    Raises:
        UsageError: a record is not as it should be; nothing was changed.
        NotFound: the file has none of a name that is wanted.
        Locked, SchemaMissing, DatabaseUnavailable, CannotRun: as in `apply_file`.
    """
    wanted = choose(records, options.only)
    with map_errors(schema):
        names = list(wanted)
        rows = await connection.fetch(FIND_ENDPOINTS, names)
        current = {row["name"]: FoundEndpoint.from_row(row, vault).settings for row in rows}
        pending = {r["name"]: r["pending"] for r in await connection.fetch(READ_PENDING, names)}
    results, declared = translate_all(wanted, options, policy, current, pending)
    while True:
        try:
            report = await apply_file(
                connection, schema, declared, actor=actor, dry_run=dry_run, vault=vault
            )
            break
        except UsageError as error:
            # One endpoint that cannot be changed now does not keep the others out.
            text = str(error)
            wrong = next((e for e in declared if text.startswith(f"{e.place}.")), None)
            if wrong is None:
                raise
            declared.remove(wrong)
            reason = text.removeprefix(f"{wrong.place}.")
            name = wrong.settings.name
            results[name] = ImportedEndpoint(wrong.place, name, "not imported", (reason,))
    return _report(dry_run, results, report)


def choose(records: Sequence[SourcedRecord], only: Sequence[str]) -> dict[str, list[SourcedRecord]]:
    """The wanted records by their names here; of one name there may be several.

    Raises:
        UsageError: a record has no name.
        NotFound: the file has none of a name.
    """
    found: dict[str, list[SourcedRecord]] = {}
    for each in records:
        found.setdefault(each.source.name_of(each.record), []).append(each)
    for name in only:
        if name not in found:
            near = closest(name, found)
            hint = f'; did you mean "{near}"?' if near else ""
            raise NotFound(f"no endpoint of the file has the name {quoted(name)}{hint}")
    return {name: each for name, each in found.items() if not only or name in only}


def translate_all(
    wanted: Mapping[str, Sequence[SourcedRecord]],
    options: ImportOptions,
    policy: EgressPolicy,
    current: Mapping[str, EndpointSettings],
    pending: Mapping[str, int],
) -> tuple[dict[str, ImportedEndpoint], list[DeclaredEndpoint]]:
    """What becomes of each record by name, and the endpoints of those with a counterpart here.

    Args:
        current: the settings of endpoints that are here.
        pending: their pending deliveries.

    Raises:
        UsageError: a record is not as it should be.
    """
    results: dict[str, ImportedEndpoint] = {}
    declared: list[DeclaredEndpoint] = []
    for name, records in wanted.items():
        source, record = records[0]
        try:
            if len(records) > 1:
                raise NotImported(f"{records[1].record.place} has the same name")
            made = source.translate(record, options)
            if options.to is not None:
                made.values["url"] = f"{options.to.rstrip('/')}/{quote(name, safe='')}"
            known = current.get(name)
            _allow_recorder(made, known, options)
            if known is not None:
                _keep_the_rest(made, known, options)
                _require_no_backlog(made, known, pending[name])
            elif made.begins_disabled:
                made.values["disabled"] = True
            endpoint = _declare(made.values, policy)
        except NotImported as reason:
            results[name] = ImportedEndpoint(record.place, name, "not imported", (str(reason),))
            continue
        declared.append(replace(endpoint, place=record.place))
        begins_disabled = tuple(made.begins_disabled) if known is None else ()
        results[name] = ImportedEndpoint(
            record.place, name, "add", tuple(made.notes), begins_disabled
        )
    return results, declared


def _allow_recorder(
    made: Translation, known: EndpointSettings | None, options: ImportOptions
) -> None:
    """Open the address of a recorder in a private network, and close it again after that."""
    networks = [] if known is None else [*known.allow_networks]
    former = None if known is None else _private_address(known.url)
    address = None if options.to is None else _private_address(options.to)
    kept = [each for each in networks if each != former or address == former]
    made.values["allow_networks"] = list(dict.fromkeys([*kept, *([address] if address else [])]))


def _private_address(url: str) -> str | None:
    try:
        host = ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return None
    return None if host.is_global else str(ip_network(host))


def _keep_the_rest(made: Translation, known: EndpointSettings, options: ImportOptions) -> None:
    """Add the settings that an endpoint has and its record does not say.

    Raises:
        NotImported: it is the endpoint of another tenant.
    """
    if known.tenant != made.values.get("tenant"):
        raise NotImported("an endpoint here has its name, and another tenant")
    values = to_file_values(known)
    given = made.values
    kept = values.get("headers", {})
    hidden = {name: None for name in made.hidden_headers if name in kept}
    if "headers" in given or hidden:
        given["headers"] = {**kept, **given.get("headers", {}), **hidden}
    if "compat" in given and known.compat is not None and known.compat.until is not None:
        given["compat"].setdefault("until", format_until(known.compat.until))
    made.values = {**values, **given}


def _require_no_backlog(made: Translation, known: EndpointSettings, pending: int) -> None:
    """Require that a new URL does not get what waits for the present one.

    Raises:
        NotImported: it would.
    """
    if pending and made.values["url"] != known.url:
        raise NotImported(
            f"{count(pending, 'delivery')} for {known.url} would go to {made.values['url']}; let "
            "that one take them first, or change it with outbox endpoint update --url"
        )


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


def _report(
    dry_run: bool, results: Mapping[str, ImportedEndpoint], report: ApplyReport
) -> ImportReport:
    steps = {step.name: step for step in report.endpoints}
    endpoints = []
    for name, each in results.items():
        if each.action != "not imported":
            step = steps[name]
            assert step.action != "remove"
            each = replace(each, action=step.action, changed=step.changed)
        endpoints.append(each)
    times = Counter(each.action for each in endpoints)
    counts = (times["add"], times["change"], times["keep"], times["not imported"])
    return ImportReport(dry_run, *counts, tuple(endpoints))
