"""Rotation of an endpoint's secrets: of its signature, and of its compat signature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict, UsageError
from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.endpoints.live_secrets import (
    OVERLAP_S,
    LiveSecrets,
    new_secret,
    stored_compat_secret,
    stored_secret,
)
from outbox.operations.endpoints.states import require_state
from outbox.store.change import make_change
from outbox.store.connection.secrets import CLEAR

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.secret_text import GivenSecret
    from outbox.operations.endpoints.found import FoundEndpoint
    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault


@dataclass(frozen=True, slots=True)
class Rotation:
    """A new secret, shown only now."""

    id: UUID
    name: str
    secret: str | None
    """The secret, or the public key `whpk_…` of an Ed25519 key; null: a shared secret that was
    given."""
    live: int
    """Number of live secrets, including the new one."""
    old_until: datetime | None
    """Expiry of the last old secret; None: all old ones are deleted."""


async def rotate_secret(
    connection: Connection[Any],
    schema: str,
    name: str,
    *,
    actor: str,
    overlap_s: float = OVERLAP_S,
    vault: Vault = CLEAR,
    ed25519: bool | None = None,
    given: GivenSecret | None = None,
    compat: bool = False,
    owner: str | None = None,
) -> Rotation:
    """Add a new secret; the old ones stay valid for `overlap_s` seconds.

    Args:
        overlap_s: validity of the old secrets, in seconds; 0 deletes them.
        ed25519: create an Ed25519 key; None: the same kind as the newest secret.
        given: the new secret; None: one is generated.
        compat: it is of the compat signature, whose secrets are given.
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        UsageError: the given secret is invalid, or there is no compat signature.
        Locked: the vault lacks the key in use.
        Conflict: the limit of live secrets is reached, or the secret is the newest one already.
    """
    if ed25519 is not None and (given is not None or compat):
        raise UsageError("ed25519: is for a new key; a given secret says its kind")
    if compat and given is None:
        raise UsageError("secret: is missing; the secret of a compat signature is given")

    async def plan(change: Change) -> Rotation:
        endpoint = await find_endpoint(change, name, owner, vault)
        require_state(endpoint, ("active", "paused", "disabling", "disabled"), "given a new secret")
        in_use = await vault.for_writing(change.db)
        live = await LiveSecrets.read(change.db, endpoint.id, overlap_s=overlap_s)
        if given is None:
            text = new_secret(ed25519=live.is_ed25519 if ed25519 is None else ed25519)
        else:
            text = _stored(endpoint, given, compat=compat)
            if live.is_newest(text, vault, compat=compat):
                raise Conflict(f'endpoint "{name}" signs with this secret already')
        new = live.plan(text, vault, in_use, name, compat=compat)
        new.write(change)
        count = len(new.kept_ids) + 1
        data = {"name": name, "overlap_s": overlap_s, "live": count}
        kinds = {"ed25519": new.public_key, "given": given, "compat": compat}
        change.journal(
            "endpoint_secret_rotated",
            endpoint.id,
            data | {kind: True for kind, applies in kinds.items() if applies},
        )
        shown = new.public_key or (text if given is None else None)
        return Rotation(endpoint.id, name, shown, count, max(new.kept_until, default=None))

    return await make_change(connection, schema, actor, plan)


def _stored(endpoint: FoundEndpoint, given: GivenSecret, *, compat: bool) -> str:
    """The stored form of a given secret."""
    if not compat:
        return stored_secret(given, endpoint.row["url"])
    form = endpoint.settings.compat
    if form is None:
        raise UsageError(
            f'endpoint "{endpoint.name}" has no compat signature; add one with its secret: outbox '
            "endpoint update NAME --compat PRESET --compat-secret-file FILE"
        )
    if given.encoding is not None:
        form = replace(form, secret_encoding=given.encoding)
    return stored_compat_secret(form, given.text)
