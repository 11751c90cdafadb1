"""Watched sockets, also when a descriptor is used again before its first owner learns that it was
closed.
"""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from outbox.destinations.http.http1.watched_sockets import WatchedSockets

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT = 1100
"""More sockets than epoll reports unless it is asked for more."""


@pytest.fixture
def open_pairs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    stack.enter_context(here)
    stack.enter_context(there)
    return here, there


def test_data_and_ends_are_seen_until_the_socket_is_forgotten(open_pairs: ExitStack) -> None:
    watched = WatchedSockets()
    (idle, _), (receiving, sender), (ended, peer) = (_pair(open_pairs) for _ in range(3))
    for each in (idle, receiving, ended):
        watched.watch(each.fileno(), each)
    assert watched.readable() == set()
    sender.send(b"x")
    peer.close()
    assert watched.readable() == {receiving.fileno(), ended.fileno()}
    watched.forget(ended.fileno(), ended)
    receiving.recv(1)
    assert watched.readable() == set()


def test_a_descriptor_that_is_used_again_belongs_to_its_new_owner(open_pairs: ExitStack) -> None:
    watched = WatchedSockets()
    first, _ = _pair(open_pairs)
    fd = first.fileno()
    watched.watch(fd, "first")
    second, sender = _pair(open_pairs)
    first.detach()
    os.dup2(second.fileno(), fd)  # Closes the first socket.
    with socket.socket(fileno=fd):
        watched.watch(fd, "second")
        watched.forget(fd, "first")
        sender.send(b"x")
        assert watched.readable() == {fd}


def test_a_closed_socket_is_forgotten(open_pairs: ExitStack) -> None:
    watched = WatchedSockets()
    here, there = _pair(open_pairs)
    fd = here.fileno()
    watched.watch(fd, "owner")
    there.send(b"x")
    here.close()
    watched.forget(fd, "owner")
    assert watched.readable() == set()


def test_nothing_is_readable_after_the_end(open_pairs: ExitStack) -> None:
    watched = WatchedSockets()
    here, there = _pair(open_pairs)
    watched.watch(here.fileno(), "owner")
    there.send(b"x")
    watched.close()
    watched.forget(here.fileno(), "owner")
    assert watched.readable() == set()


def test_all_of_many_are_seen(open_pairs: ExitStack) -> None:
    watched, reader = WatchedSockets(), socket.socketpair()
    for each in reader:
        open_pairs.enter_context(each)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * COUNT), limits[1]))
    open_pairs.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    reader[1].send(b"x")
    fds = {os.dup(reader[0].fileno()) for _ in range(COUNT)}
    try:
        for fd in fds:
            watched.watch(fd, fd)
        assert watched.readable() == fds
    finally:
        for fd in fds:
            os.close(fd)
