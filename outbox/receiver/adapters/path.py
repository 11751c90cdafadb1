"""The path at which a middleware receives deliveries."""

from __future__ import annotations

import re

from outbox.core.model.text import quoted
from outbox.errors import UsageError

_PATH = re.compile(r"/[^?#\s]*")


class ReceiverPath:
    """A path, compared without a slash at its end.

    Raises:
        UsageError: it does not begin with a slash, or is a URL.
    """

    def __init__(self, path: str) -> None:
        if not (isinstance(path, str) and _PATH.fullmatch(path)):
            raise UsageError(
                f'path: must begin with "/", such as "/hooks", not {quoted(str(path))}'
            )
        self._path = path.rstrip("/")

    def matches(self, prefix: str, path: str) -> bool:
        """Whether a request is for this path.

        Args:
            prefix: the path of the application, ASGI's `root_path` or WSGI's `SCRIPT_NAME`.
            path: the path of the request.  Some servers of ASGI leave out the prefix.
        """
        prefix, path = prefix.rstrip("/"), path.rstrip("/")
        inner = path.removeprefix(prefix) if f"{path}/".startswith(f"{prefix}/") else path
        return self._path in (path, inner, prefix + inner)
