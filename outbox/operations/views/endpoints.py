"""JSON form of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model import endpoint_config

if TYPE_CHECKING:
    from outbox.core.model.endpoint import EndpointSettings
    from outbox.operations.apply import ApplyOutcome, ApplyStep
    from outbox.operations.endpoint_changes import NewEndpoint, Updated
    from outbox.operations.endpoints import EndpointDetail


def detail(found: EndpointDetail) -> dict[str, Any]:
    """JSON form of one endpoint."""
    return {
        "endpoint": found.row,
        "settings": settings(found.settings),
        "health": found.health,
        "secrets": found.secrets,
        "certificate": found.certificate,
        "lanes": found.lanes,
        "ownership_history": found.ownership_history,
    }


def settings(held: EndpointSettings) -> dict[str, Any]:
    """JSON form of settings, by the names used in files and flags; header values are null,
    because they may be credentials.
    """
    return {name: endpoint_config.setting_value(held, name) for name in endpoint_config.FIELDS}


def added(made: NewEndpoint) -> dict[str, Any]:
    """JSON form of a new endpoint, with its secret."""
    return {
        "id": made.id,
        "name": made.name,
        "url": made.url,
        "secret": made.secret,
        "lanes": made.lanes,
    }


def updated(done: Updated) -> dict[str, Any]:
    """JSON form of an update: each changed setting with its old and new value."""
    changes = {each.setting: [each.old, each.new] for each in done.differences}
    return {"id": done.id, "name": done.name, "changed": changes}


def applied(outcome: ApplyOutcome, *, dry_run: bool) -> dict[str, Any]:
    """JSON form of the result of apply."""
    return {
        "dry_run": dry_run,
        "changes": outcome.changes,
        "endpoints": [_step(step) for step in outcome.steps],
        "not_in_the_file": outcome.others,
    }


def _step(step: ApplyStep) -> dict[str, Any]:
    result: dict[str, Any] = {"action": step.action, "name": step.name, "id": step.id}
    if step.differences:
        result["changed"] = {each.setting: [each.old, each.new] for each in step.differences}
    if step.action == "remove":
        result["pending"] = step.pending
    if step.secret is not None:
        result["secret"] = step.secret
    return result
