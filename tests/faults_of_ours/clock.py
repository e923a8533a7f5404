"""A wall clock that is set while a server runs, for that server and its agent alone.

Debian's libfaketime was tried first: under it `time.sleep` of Python 3.11 fails with EINVAL.
"""

import mmap
import os
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    real = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        if (page != MAP_FAILED) offset = page;
        close(file);
    }
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (offset && !result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    int result = clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return result;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """`environ` is for the server that has it; `set` moves its wall clock."""

    def __init__(self, folder: Path) -> None:
        library, offset = folder / "clock.so", folder / "clock.offset"
        (folder / "clock.c").write_text(SOURCE)
        compiler = ["gcc", "-shared", "-fPIC", "-O2", "-o", library, folder / "clock.c", "-ldl"]
        subprocess.run(compiler, check=True)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}

    def set(self, seconds: int) -> None:
        """So far from the true time."""
        self._map[:] = struct.pack("<q", seconds)


def shown(clock: Clock) -> float:
    """What another process takes for the time, less what this one does."""
    import sys
    import time

    done = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env=os.environ | clock.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout) - time.time()
