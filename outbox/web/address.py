"""Where a server of ours listens: `HOST:PORT`."""

from __future__ import annotations

from dataclasses import dataclass

PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or address, and a port; port 0 takes any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}/"


def parse_address(text: str) -> Address:
    """`127.0.0.1:8080`, `[::1]:8080`, `localhost:8080`, or `:8080` for every address.

    Raises:
        ValueError: what is wrong, without the name of the setting.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or (":" in host and not bracketed):
        raise ValueError(f'"{text}" is not HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080')
    if int(port) > PORT_MAX:
        raise ValueError(f'"{text}": a port is at most {PORT_MAX}')
    return Address(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104 (who writes :8080 means it)
