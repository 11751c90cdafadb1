"""`outbox rekey`: encrypt stored secrets, rotate the key, or decrypt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, json_option, run_operation, settings_options
from outbox.cli.output import echo, emit_json
from outbox.cli.progress import confirm, progress_bar, require_terminal
from outbox.core.model.text import count
from outbox.errors import UsageError
from outbox.store.connection.secrets import SETTING, Vault, new_key
from outbox_doctor.maintenance import rotate_key

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox_doctor.maintenance.rotate_key import RekeyProgress, SecretCount

EXIT_NOT_ALL = 1


@click.command(
    epilog=f"""\b
Example, for the first encryption (without OLD) or a key rotation:
  outbox rekey --generate                        generate a key, NEW
  {SETTING}="NEW OLD"                           set on every relay; restart them one by one
  {SETTING}="NEW OLD" outbox rekey              encrypt all secrets with NEW
  {SETTING}=NEW                                 OLD is no longer needed

\b
Store keys outside the database, for example with {SETTING}_FILE. Secrets cannot be
recovered without their key: receivers would need new secrets.
"""
)
@click.option("--generate", is_flag=True, help="Print a new key; change nothing.")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if secrets would be rewritten.")
@click.option("--decrypt", is_flag=True, help="Decrypt all secrets, so that no key is needed.")
@click.option("--yes", is_flag=True, help="With --decrypt: do not ask for confirmation.")
@click.option(
    "--force", is_flag=True, help="Continue even if a running relay does not have the key."
)
@json_option
@settings_options
@click.pass_context
def command(
    ctx: click.Context,
    settings: Settings,
    generate: bool,
    check: bool,
    decrypt: bool,
    yes: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Encrypt all secrets in the database with the first key of OUTBOX_KEY.

    Secrets are signing secrets, header values and client certificates. New secrets
    are always encrypted if OUTBOX_KEY is set; this command converts existing ones.
    Deliveries continue meanwhile, and an interrupted run can be repeated.
    """
    if generate:
        key = new_key()
        if as_json:
            emit_json({"key": key})
        else:
            echo(key)
        return
    vault = Vault.from_settings(settings)
    if not vault.key_ids:
        raise UsageError(
            f"no encryption key; set {SETTING} (generate one with: outbox rekey --generate)"
        )
    if decrypt:
        if not yes:
            require_terminal(
                "clear-text secrets allow every reader of the database to sign; confirm with --yes"
            )
            confirm("decrypt all secrets?")
        vault = vault.in_clear()
    if check:
        kept = run_operation(settings, rotate_key.count_secrets)
        ctx.exit(EXIT_NOT_ALL if _print_encryption(kept, vault, as_json=as_json) else 0)
    kept, done = run_operation(settings, _rekey, vault, force=force)
    if as_json:
        emit_json(done)
    else:
        how = "in clear" if done.key is None else f"encrypted with the key {done.key}"
        echo(
            f"{count(done.secrets, 'secret')} of {count(done.endpoints, 'endpoint')} rewritten, "
            f"{how}"
        )
        for reason in done.locked:
            echo(f"skipped: {reason}", err=True)
        if done.left and not done.locked:
            echo(f"{count(done.left, 'secret')} changed concurrently; run again", err=True)
        was_in_clear = any(each.key is None for each in kept)
        if done.secrets and was_in_clear and done.key is not None:
            echo(
                "Backups and logs of the database may still contain the clear text; to replace the "
                "secrets: outbox endpoint rotate-secret.",
                err=True,
            )
    if done.left:
        ctx.exit(EXIT_NOT_ALL)


async def _rekey(
    connection: Connection[Any], schema: str, vault: Vault, *, force: bool
) -> tuple[list[SecretCount], RekeyProgress]:
    """Rewrite the secrets; returns their encryption before, and the result."""
    kept = await rotate_key.count_secrets(connection, schema)
    with progress_bar("encrypting") as show:
        return kept, await rotate_key.rotate_key(
            connection,
            schema,
            vault,
            actor=actor(),
            force=force,
            on_progress=lambda done: show(done.done, done.endpoints),
        )


def _print_encryption(kept: list[SecretCount], vault: Vault, *, as_json: bool) -> bool:
    """Print how secrets are encrypted; returns whether some need to be rewritten."""
    other = sum(each.count for each in kept if each.key != vault.key_id)
    if as_json:
        emit_json({"key": vault.key_id, "secrets": kept, "needed": bool(other)})
        return bool(other)
    for each in kept:
        how = "in clear" if each.key is None else f"encrypted with the key {each.key}"
        echo(f"{count(each.count, 'secret')} {how}")
    unread = [each.key for each in kept if each.key and each.key not in vault.key_ids]
    if unread:
        keys = f"the key {unread[0]}" if len(unread) == 1 else f"the keys {', '.join(unread)}"
        echo(f"outbox rekey would skip secrets that {SETTING} cannot decrypt; add {keys} to it")
    if any(each.key != vault.key_id and each.key not in unread for each in kept):
        rest = "the rest" if unread else "the others"
        echo(f"outbox rekey would rewrite {rest}")
    if not other:
        echo("nothing to do")
    return bool(other)
