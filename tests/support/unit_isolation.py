"""Tests of the tier `unit` start no process and open no socket but a socketpair.

A pytest plugin.  An audit hook sees each attempt of Python's own modules, in every tier, and fails
the test.  What libraries do in C (libpq, uvloop, librdkafka) raises no audit event.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.tiers import is_unit

if TYPE_CHECKING:
    from collections.abc import Generator

DENIED = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyaddr",
    "socket.gethostbyname",
    "socket.getnameinfo",
    "socket.sendmsg",
    "socket.sendto",
    "subprocess.Popen",
}
"""Audit events that a test of the tier `unit` does not raise."""


class UnitIsolation:
    """Watches the test that runs."""

    def __init__(self) -> None:
        self._is_unit = False
        self._attempts: list[str] = []
        sys.addaudithook(self._audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._is_unit = is_unit(item)
        try:
            return (yield)
        finally:
            self._is_unit = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        try:
            return (yield)
        finally:
            attempts, self._attempts = self._attempts, []
            if attempts:
                pytest.fail(
                    f"a test of the tier `unit` did {', '.join(sorted(set(attempts)))}: "
                    "mark it with @pytest.mark.system",
                    pytrace=False,
                )

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        if self._is_unit and event in DENIED:
            self._attempts.append(event)
            raise PermissionError(f"{event} in a test of the tier `unit`")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UnitIsolation(), "unit isolation")
