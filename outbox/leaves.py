"""Parts of the product that are packages of their own.

A leaf is imported when it is used, and nothing here needs it.  Leaves and this package are released
together: one of another version is refused, because it was tested with other internals.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from outbox.errors import MissingExtra
from outbox.extras import install_hint
from outbox.version import __version__

if TYPE_CHECKING:
    from types import ModuleType


class Leaf(NamedTuple):
    """A package beside this one."""

    distribution: str
    extra: str
    """The extra of outbox-relay that installs it."""
    needs: tuple[Leaf, ...] = ()
    """Other leaves that it imports."""

    @property
    def package(self) -> str:
        """Its root module."""
        return self.distribution.replace("-", "_")

    def load(self, module: str) -> ModuleType:
        """Import a module of the leaf.

        Raises:
            MissingExtra: as `require`.
        """
        self.require()
        return import_module(f"{self.package}.{module}")

    def require(self) -> None:
        """Check that the leaf and those that it needs are installed, without importing them.

        Raises:
            MissingExtra: one is not installed, or another version of it is.
        """
        for each in (self, *self.needs):
            each._require_itself()

    def _require_itself(self) -> None:
        # Each command imports this module, and few load a leaf.
        from importlib import metadata

        try:
            found = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            wrong = f"{self.distribution} is not installed"
        else:
            if found == __version__:
                return
            wrong = f"{self.distribution} has version {found}, outbox-relay {__version__}"
        hint = install_hint(f"outbox-relay[{self.extra}]=={__version__}", self.extra)
        raise MissingExtra(f"{wrong}; {hint}")


ADOPT = Leaf("outbox-adopt", "adopt")
"""`outbox adopt`."""
DOCTOR = Leaf("outbox-doctor", "relay")
"""`outbox trace`, `doctor`, `alerts`, `journal`, `once`, `verify`, `resequence` and `rekey`."""
API = Leaf("outbox-api", "relay", needs=(DOCTOR,))
"""The HTTP API with its page, and the receivers' listener."""
DEVTOOLS = Leaf("outbox-devtools", "demo", needs=(DOCTOR,))
"""`outbox demo`, `listen`, `conform` and `prove`, and an embedded PostgreSQL."""
