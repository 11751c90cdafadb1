"""Parsing of connection strings: URLs, key=value pairs and service files, as libpq parameters.

Grammar: PostgreSQL documentation, 34.1.1 Connection Strings, and 34.17 for service files.  Error
messages never quote the text: a part that cannot be parsed may be a password.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.core.model.text import is_text
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_HOST = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::([0-9]*))?")
_PAIR = re.compile(
    r"\s*([A-Za-z_]\w*)\s*=\s*('(?:[^'\\]|\\.)*'|(?:[^\s\\']|\\.)*)(?=\s|$)", re.DOTALL
)


def parameters(text: str, source: str) -> dict[str, str]:
    """Parse a URL or key=value pairs; empty parameters are omitted.

    Raises:
        UsageError: it is neither.
    """
    text = text.strip()
    if "\0" in text:
        raise invalid_address(source, "it has a NUL byte in it")
    if not is_text(text):
        raise invalid_address(source, "it is not UTF-8 text")
    scheme = _SCHEME.match(text)
    if scheme:
        return _parse_url(text, scheme[1], source)
    if "=" in text:
        return _parse_pairs(text, source)
    if text:
        raise invalid_address(source, "it is neither postgresql://… nor key=value pairs")
    return {}


def _parse_url(text: str, scheme: str, source: str) -> dict[str, str]:
    dialect, _, _ = scheme.lower().partition("+")
    if dialect not in ("postgresql", "postgres"):
        raise invalid_address(source, f'"{scheme[:20]}:" is not PostgreSQL; write postgresql://…')
    rest = text[len(scheme) + 1 :]
    if not rest.startswith("//"):
        raise invalid_address(source, f"write {scheme}://…, with two slashes")
    rest, _, query = rest[2:].partition("?")
    given: dict[str, str] = {}
    authority, _, path = rest.partition("/")
    # A password with an unescaped "/" or "?" would otherwise be parsed as a port, a path and
    # parameters, and be shown in messages.
    if "@" in path or (":" in authority and "@" in query):
        raise invalid_address(
            source,
            'inside a password, a name or a value write "/" as %2F, "?" as %3F, "@" as %40',
        )
    userinfo, at, hosts = authority.rpartition("@")
    if at:
        user, _, password = userinfo.partition(":")
        given |= {"user": _decode(user, source), "password": _decode(password, source)}
    if hosts:
        given |= _parse_hosts(hosts, source)
    given["dbname"] = _decode(path, source)
    for parameter in filter(None, query.split("&")):
        name, equals, value = parameter.partition("=")
        if not equals:
            raise invalid_address(source, 'a parameter after "?" has no "="')
        given[_decode(name, source)] = _decode(value, source)
    return {name: value for name, value in given.items() if value}


def _parse_hosts(text: str, source: str) -> dict[str, str]:
    hosts, ports = [], []
    for spec in text.split(","):
        match = _HOST.fullmatch(spec)
        if not match:
            raise invalid_address(
                source,
                "the part after // is not host:port (IPv6 in [brackets]; inside a password "
                "write @ : / # as %40 %3A %2F %23)",
            )
        hosts.append(_decode(match[1] or match[2], source))
        ports.append(match[3] or "")
    return {"host": ",".join(hosts), "port": ",".join(ports) if any(ports) else ""}


def _decode(text: str, source: str) -> str:
    """Percent-decoding as libpq does it: strict, UTF-8, and "+" is a plus."""
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise invalid_address(source, 'a "%" is not followed by two hex digits; write %25 for "%"')
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda m: bytes([int(m[1], 16)]), text.encode())
    if b"\0" in raw:
        raise invalid_address(source, "%00 cannot be in it")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise invalid_address(source, "its percent-encoding is not UTF-8") from None


def _parse_pairs(text: str, source: str) -> dict[str, str]:
    given: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _PAIR.match(text, position)
        if not match:
            raise invalid_address(
                source,
                f"pair {len(given) + 1} is not key=value; quote a value with spaces or an "
                "empty one as 'it\\'s'",
            )
        value = match[2]
        if value.startswith("'"):
            value = value[1:-1]
        given[match[1]] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        position = match.end()
        if not text[position:].strip():
            break
    return {name: value for name, value in given.items() if value}


def service_parameters(
    name: str, servicefile: str | None, env: Mapping[str, str], source: str
) -> dict[str, str]:
    """Read a service from `servicefile`, PGSERVICEFILE, the home directory or PGSYSCONFDIR.

    Raises:
        UsageError: no file defines it.
    """
    explicit = servicefile or env.get("PGSERVICEFILE")
    candidates = [Path(explicit)] if explicit else []
    if not explicit:
        if env.get("HOME"):
            candidates.append(Path(env["HOME"]) / ".pg_service.conf")
        if env.get("PGSYSCONFDIR"):
            candidates.append(Path(env["PGSYSCONFDIR"]) / "pg_service.conf")
    for path in candidates:
        services = configparser.RawConfigParser(
            delimiters=("=",), comment_prefixes=("#",), strict=False
        )
        try:
            services.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            raise invalid_address(source, f"{path} cannot be read as a service file") from None
        if services.has_section(name):
            return dict(services.items(name))
    raise invalid_address(source, f'service "{name}" is in none of the service files')


def invalid_address(source: str, what: str) -> UsageError:
    """Build the error for an invalid address."""
    return UsageError(f"{source} is not a database address: {what}")
