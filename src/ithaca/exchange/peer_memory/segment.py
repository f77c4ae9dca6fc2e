"""A piece of memory that several processes map: made by one, sealed, and handed over by its descriptor."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

# Python 3.10 to 3.13 do not all name these; values from linux/fcntl.h.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing


@dataclass
class Segment:
    """A mapping of a memfd. It is never unmapped by hand, see `host`."""

    memory: mmap.mmap
    capacity: int

    @classmethod
    def map(cls, fd: int, capacity: int) -> Segment:
        """Map what a peer made. `OSError` if it is smaller than said, or could still shrink under this rank's feet."""
        nbytes = max(1, capacity)
        if os.fstat(fd).st_size < nbytes:
            raise OSError(errno.EINVAL, f"{nbytes} bytes were required, the descriptor holds {os.fstat(fd).st_size}")
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(errno.EPERM, "a memory sealed against resizing was required")
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return cls(mmap.mmap(fd, nbytes, flags=flags), capacity)


def allocate(capacity: int) -> io.FileIO:
    """A sealed memfd whose pages exist: without that, a full machine kills at the first write, and not here.

    The kernel does not limit a memfd: asked for too much it would end a process to find it. So the machine's available
    memory is looked up first.
    """
    nbytes, available = max(1, capacity), _available()
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{nbytes} bytes were required, {available} are available")
    memory = io.FileIO(os.memfd_create("ithaca", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        os.ftruncate(memory.fileno(), nbytes)
        os.posix_fallocate(memory.fileno(), 0, nbytes)
        fcntl.fcntl(memory.fileno(), _F_ADD_SEALS, _SEALS)
    except BaseException:
        memory.close()
        raise
    return memory


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENOSYS, "/proc/meminfo does not say how much memory is available")
