"""Listen addresses: `HOST:PORT`."""

from __future__ import annotations

from dataclasses import dataclass

PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A host name or IP address and a port; port 0 selects a free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}/"


def parse_address(text: str) -> Address:
    """Parse `127.0.0.1:8080`, `[::1]:8080`, `localhost:8080`, or `:8080` for all interfaces.

    Raises:
        ValueError: the text is invalid; the message does not name the setting.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or (":" in host and not bracketed):
        raise ValueError(f'"{text}" is not HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080')
    if int(port) > PORT_MAX:
        raise ValueError(f'"{text}": a port is at most {PORT_MAX}')
    return Address(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104 (:8080 asks for all interfaces)
