"""`outbox rekey`: secrets at rest are encrypted, with another key, or no more."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
from outbox.cli.output import count, emit_json
from outbox.core.model.text import safe
from outbox.errors import UsageError
from outbox.operations import rotate_key
from outbox.store.connection.secrets import SETTING, Vault, new_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.config import Settings
    from outbox.operations.rotate_key import Kept, Rekeyed

EXIT_NOT_ALL = 1


@click.command(
    epilog=f"""\b
Example, for the first time (without OLD) or with another key:
  outbox rekey --generate                        a new key, NEW
  {SETTING}="NEW OLD"                           to every relay; restart them, one by one
  {SETTING}="NEW OLD" outbox rekey              now all is encrypted with NEW
  {SETTING}=NEW                                 OLD is needed no more

\b
Keep keys where the database is not, such as in {SETTING}_FILE.  Without the key what is
encrypted with it is lost: receivers would need new secrets.
"""
)
@click.option("--generate", is_flag=True, help="Print a new key, and do nothing else.")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when it is needed.")
@click.option("--decrypt", is_flag=True, help="Write all in clear, so that no key is needed.")
@click.option("--yes", is_flag=True, help="With --decrypt: do not ask.")
@click.option("--force", is_flag=True, help="Although a running relay has not the key.")
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
    """Encrypt the secrets in the database anew, with the first key of OUTBOX_KEY.

    Signing secrets, values of endpoints' headers, and client certificates.  New
    ones are encrypted as soon as there is a key; this is for those that are there.
    Deliveries go on meanwhile, and an interrupted run goes on when it is repeated.
    """
    if generate:
        key = new_key()
        if as_json:
            emit_json({"key": key})
        else:
            click.echo(key)
        return
    vault = Vault.of(settings)
    if not vault.key_ids:
        raise UsageError(f"there is no key; set {SETTING} (outbox rekey --generate makes one)")
    if decrypt:
        if not yes:
            _ask()
        vault = vault.in_clear()
    if check:
        kept = run_async(_survey(settings))
        ctx.exit(EXIT_NOT_ALL if _tell_kept(kept, vault, as_json=as_json) else 0)
    kept, done = run_async(_rekey(settings, vault, force=force))
    if as_json:
        emit_json(done)
    else:
        how = "in clear" if done.key is None else f"encrypted with the key {done.key}"
        click.echo(
            f"{count(done.secrets, 'secret')} of {count(done.endpoints, 'endpoint')} written anew, "
            f"{how}"
        )
        for why in done.locked:
            click.echo(safe(f"left alone: {why}"), err=True)
        if done.left and not done.locked:
            click.echo(f"{count(done.left, 'secret')} left: somebody writes them; again!", err=True)
        was_in_clear = any(each.key is None for each in kept)
        if done.secrets and was_in_clear and done.key is not None:
            click.echo(
                "What was in clear may still stand in backups and logs of the database: "
                "outbox endpoint rotate-secret gives other secrets.",
                err=True,
            )
    if done.left:
        ctx.exit(EXIT_NOT_ALL)


async def _survey(settings: Settings) -> list[Kept]:
    async with database(settings) as connection:
        return await rotate_key.survey(connection, settings.schema_name)


async def _rekey(settings: Settings, vault: Vault, *, force: bool) -> tuple[list[Kept], Rekeyed]:
    """How secrets were kept before, and what was done."""
    async with database(settings) as connection:
        kept = await rotate_key.survey(connection, settings.schema_name)
        with _progress() as show:
            return kept, await rotate_key.rekey(
                connection,
                settings.schema_name,
                vault,
                actor=actor(),
                force=force,
                on_progress=show,
            )


def _tell_kept(kept: list[Kept], vault: Vault, *, as_json: bool) -> bool:
    """Say how secrets are kept; returns whether some are not as they should be."""
    other = sum(each.count for each in kept if each.key != vault.key_id)
    if as_json:
        emit_json({"key": vault.key_id, "secrets": kept, "needed": bool(other)})
        return bool(other)
    for each in kept:
        how = "in clear" if each.key is None else f"encrypted with the key {each.key}"
        click.echo(f"{count(each.count, 'secret')} {how}")
    unread = [each.key for each in kept if each.key and each.key not in vault.key_ids]
    if unread:
        keys = f"the key {unread[0]}" if len(unread) == 1 else f"the keys {', '.join(unread)}"
        click.echo(f"outbox rekey would leave alone what {SETTING} cannot read; add {keys} to it")
    if any(each.key != vault.key_id and each.key not in unread for each in kept):
        rest = "the rest" if unread else "the others"
        click.echo(f"outbox rekey would write {rest} anew")
    if not other:
        click.echo("nothing to do")
    return bool(other)


def _ask() -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("whoever reads the database can sign then; say --yes to do it")
    if not click.confirm("write all secrets in clear?", err=True):
        raise UsageError("nothing was changed")


@contextmanager
def _progress() -> Iterator[Callable[[Rekeyed], None]]:
    """A bar on stderr, where somebody looks at it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("encrypting", total=None)
        yield lambda done: bar.update(task, total=done.endpoints, completed=done.done)
