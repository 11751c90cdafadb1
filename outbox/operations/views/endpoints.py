"""JSON form of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model import endpoint_config

if TYPE_CHECKING:
    from outbox.core.model.endpoint import EndpointSettings
    from outbox.operations.apply import ApplyOutcome, ApplyStep
    from outbox.operations.endpoint_changes import NewEndpoint, Updated
    from outbox.operations.endpoints import EndpointDetail


def endpoint_detail(detail: EndpointDetail) -> dict[str, Any]:
    """JSON form of one endpoint."""
    return {
        "endpoint": detail.row,
        "settings": endpoint_settings(detail.settings),
        "health": detail.health,
        "secrets": detail.secrets,
        "certificate": detail.certificate,
        "lanes": detail.lanes,
        "ownership_history": detail.ownership_history,
    }


def endpoint_settings(settings: EndpointSettings) -> dict[str, Any]:
    """JSON form of settings, by the names used in files and flags; header values are null,
    because they may be credentials.
    """
    return {name: endpoint_config.setting_value(settings, name) for name in endpoint_config.FIELDS}


def new_endpoint(added: NewEndpoint) -> dict[str, Any]:
    """JSON form of a new endpoint, with its secret."""
    return {
        "id": added.id,
        "name": added.name,
        "url": added.url,
        "secret": added.secret,
        "lanes": added.lanes,
    }


def endpoint_update(updated: Updated) -> dict[str, Any]:
    """JSON form of an update: each changed setting with its old and new value."""
    changes = {each.setting: [each.old, each.new] for each in updated.differences}
    return {"id": updated.id, "name": updated.name, "changed": changes}


def apply_report(outcome: ApplyOutcome, *, dry_run: bool) -> dict[str, Any]:
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
