"""Faults of a server's machine: a clock that is set, and a disk that is slow.

A library that is loaded before PostgreSQL's own reads both from a file, at each call.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMPILER = shutil.which("cc")

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The shift of the clock, and the duration of a flush, in microseconds. */
static const int64_t none[2];
static const volatile int64_t *faults = none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("OUTBOX_TEST_FAULTS");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) faults = found;
}

static void shift(int64_t *seconds, int64_t *us) {
    int64_t at = *seconds * 1000000 + *us + faults[0];
    *seconds = at / 1000000;
    *us = at % 1000000;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t seconds = at->tv_sec, us = at->tv_nsec / 1000, rest = at->tv_nsec % 1000;
        shift(&seconds, &us);
        at->tv_sec = seconds;
        at->tv_nsec = us * 1000 + rest;
    }
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void) zone;
    struct timespec found;
    int result = clock_gettime(CLOCK_REALTIME, &found);
    at->tv_sec = found.tv_sec;
    at->tv_usec = found.tv_nsec / 1000;
    return result;
}

time_t time(time_t *at) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (at) *at = found.tv_sec;
    return found.tv_sec;
}

static void wait_for_disk(void) {
    int64_t us = faults[1];
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (us && nanosleep(&left, &left) && errno == EINTR) {}
}

int fsync(int file) {
    static int (*next)(int);
    if (!next) next = dlsym(RTLD_NEXT, "fsync");
    wait_for_disk();
    return next(file);
}

int fdatasync(int file) {
    static int (*next)(int);
    if (!next) next = dlsym(RTLD_NEXT, "fdatasync");
    wait_for_disk();
    return next(file);
}
"""


class ServerFaults:
    """The faults of the servers that are started within `loaded`."""

    def __init__(self, directory: Path) -> None:
        self._library = directory / "faults.so"
        self._path = directory / "faults"
        self._shift_s = self._flush_s = 0.0
        self._write()
        source = directory / "faults.c"
        source.write_text(_SOURCE)
        assert COMPILER is not None
        command = [
            COMPILER,
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            str(self._library),
            str(source),
            "-ldl",
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        for each in (self._path, self._library):
            each.chmod(0o644)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Start servers within this block."""
        names = {"LD_PRELOAD": str(self._library), "OUTBOX_TEST_FAULTS": str(self._path)}
        os.environ.update(names)
        try:
            yield
        finally:
            for name in names:
                del os.environ[name]

    def shift_clock(self, seconds: float) -> None:
        """Set the server's clock to its real time and so many seconds."""
        self._shift_s = seconds
        self._write()

    def slow_down(self, flush_s: float) -> None:
        """Let every flush of a file take so long in addition."""
        self._flush_s = flush_s
        self._write()

    def _write(self) -> None:
        data = struct.pack("=qq", round(self._shift_s * 1e6), round(self._flush_s * 1e6))
        # In place, because the servers have mapped it.
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(data)
