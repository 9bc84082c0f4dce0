"""Keeps freed memory in the process, which makes XLA's programs on CPUs a fifth faster.

XLA:CPU takes one fresh block for a program's temporaries at every call and gives it back afterwards. glibc maps and
unmaps a block of that size each time, so every step touches tens of thousands of new pages: 60 to 70 of 300 ms in a
9M-parameter language model, all of it in the kernel. PyTorch frees tensor by tensor and reuses most of it. Compilation,
whose threads then share one arena, takes up to half again as long.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD_BYTES, _TOP_PAD_BYTES = 2_000_000_000, 64 * 2**20
# By number, as malloc.h has them, and by the environment variables that say the same.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {
    _M_ARENA_MAX: ("MALLOC_ARENA_MAX", 1),
    _M_MMAP_MAX: ("MALLOC_MMAP_MAX_", 0),
    _M_TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD_BYTES),
    _M_TOP_PAD: ("MALLOC_TOP_PAD_", _TOP_PAD_BYTES),
}
# For processes that are to start so: what threads have allocated in before, such as torch's, keeps its manners.
ENVIRONMENT = {name: str(value) for name, value in _SETTINGS.values()}


def keep_freed_memory() -> bool:
    """Tells glibc to reuse freed memory instead of giving it back; call it before JAX starts.

    The process never shrinks again, so call it in programs that train, not in ones that do something else later. Where
    other libraries have started threads already, as torch does when it is imported, it does little for JAX: start the
    process with ``ENVIRONMENT`` there.

    Returns:
        Whether it could be told: False where the C library is not glibc, which changes nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, value) for number, (_, value) in _SETTINGS.items())
