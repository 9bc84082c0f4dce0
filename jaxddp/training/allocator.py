"""Keeps freed memory in the process, which makes XLA's programs on CPUs a fifth faster (``docs/cpu-speed.md``)."""

import ctypes
import platform

# Environment variables of glibc: the number of each in malloc.h, and its value.
_SETTINGS = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2_000_000_000),
    "MALLOC_TOP_PAD_": (-2, 64 * 2**20),
}
# For processes still to be started: arenas in which threads have allocated before, such as torch's, do not change.
ENVIRONMENT = {name: str(value) for name, (_, value) in _SETTINGS.items()}


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory instead of returning it to the system; call it before JAX starts.

    Once another library has started threads, as torch does, set ``ENVIRONMENT`` for a new process instead. Gives
    whether it was set: only where the C library is glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, value) for number, value in _SETTINGS.values())
