"""Extras: what is installed beside publishing and the receiver library, such as `[relay]`.

A name that needs an extra is always there, and importing it does not fail: its use does, with the
command that installs the extra.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outbox.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

RELAY = "relay"
IMAGE_EXTRAS = "image-extras"
"""File in the environment of an image of `deploy/Dockerfile`: its build argument EXTRAS."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Import the packages of an extra in the block.

    Args:
        what: needs the extra, for the error.

    Raises:
        MissingExtra: one of them is not installed, or an older version of it is.
    """
    try:
        yield
    except ImportError as error:
        missing = missing_extra(error, extra, what)
        if missing is None:
            raise
        raise missing from error


def missing_extra(error: ImportError, extra: str, what: str) -> MissingExtra | None:
    """The error that names the extra; None: the module is our own, or not named."""
    package = (error.name or __package__).partition(".")[0]
    if package == __package__:
        return None
    needed = (
        f"the package {package}, which is not installed"
        if isinstance(error, ModuleNotFoundError)
        else f"another version of the package {package}"
    )
    return MissingExtra(f"{what} needs {needed}; {install_hint(f'outbox-relay[{extra}]', extra)}")


def install_hint(requirement: str, extra: str) -> str:
    """What installs a requirement: pip, or in an image, which has no pip, its build argument."""
    try:
        chosen = Path(sys.prefix, IMAGE_EXTRAS).read_text("utf-8").strip()
    except OSError:
        return f"run: pip install '{requirement}'"
    return f"build the image with --build-arg EXTRAS={','.join(filter(None, (chosen, extra)))}"


def load_name(module: str, name: str, what: str) -> Any:
    """Import a public name from the module that defines it.

    Returns:
        It, or if it needs `[relay]` and that is not installed, a class of that name: creating an
        instance, as a call of a function does, raises MissingExtra.
    """
    try:
        with needs_extra(RELAY, what):
            return getattr(import_module(module), name)
    except MissingExtra as error:
        message = str(error)

    def raise_missing(*_: object, **__: object) -> NoReturn:
        raise MissingExtra(message)

    return type(name, (), {"__new__": raise_missing, "__doc__": message, "__module__": module})
