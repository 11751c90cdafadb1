"""How endpoints are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model import endpoint_config

if TYPE_CHECKING:
    from outbox.core.model.endpoint import EndpointSettings
    from outbox.operations.apply import Outcome, Step
    from outbox.operations.endpoint_changes import NewEndpoint, Updated
    from outbox.operations.endpoints import Detail


def detail(found: Detail) -> dict[str, Any]:
    """Everything about one."""
    return {
        "endpoint": found.row,
        "settings": settings(found.settings),
        "health": found.health,
        "secrets": found.secrets,
        "certificate": found.certificate,
        "lanes": found.lanes,
        "hands": found.hands,
    }


def settings(held: EndpointSettings) -> dict[str, Any]:
    """Settings by the names of files and flags; values of headers, which may be credentials,
    are null.
    """
    return {name: endpoint_config.value(held, name) for name in endpoint_config.FIELDS}


def added(made: NewEndpoint) -> dict[str, Any]:
    """A new one, with its secret."""
    return {
        "id": made.id,
        "name": made.name,
        "url": made.url,
        "secret": made.secret,
        "lanes": made.lanes,
    }


def updated(done: Updated) -> dict[str, Any]:
    """What was changed: each setting with its old and its new value."""
    changes = {each.setting: [each.old, each.new] for each in done.differences}
    return {"id": done.id, "name": done.name, "changed": changes}


def applied(outcome: Outcome, *, dry_run: bool) -> dict[str, Any]:
    """What was made of a file."""
    return {
        "dry_run": dry_run,
        "changes": outcome.changes,
        "endpoints": [_step(step) for step in outcome.steps],
        "not_in_the_file": outcome.others,
    }


def _step(step: Step) -> dict[str, Any]:
    told: dict[str, Any] = {"action": step.action, "name": step.name, "id": step.id}
    if step.differences:
        told["changed"] = {each.setting: [each.old, each.new] for each in step.differences}
    if step.action == "remove":
        told["owed"] = step.owed
    if step.secret is not None:
        told["secret"] = step.secret
    return told
