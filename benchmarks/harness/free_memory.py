"""Free memory for ranks, checked before they start: the system kills processes that exceed it without a message."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROCESS_BYTES = 2**29  # a rank's process with both frameworks loaded


def free_bytes(kind: str) -> int:
    """Free memory for ranks of a kind: of the machine and its container, or of the fullest GPU."""
    if kind == "gpus":
        import torch

        return min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count()))
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (told := Path("/proc/meminfo")).exists():
        found = re.search(r"^MemAvailable: +(\d+) kB", told.read_text(), re.MULTILINE)
        free = int(found.group(1)) * 1024 if found else free
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        held = int(limit.with_name("memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)", limit.with_name("memory.stat").read_text(), re.MULTILINE)
        free = min(free, int(most) - held + int(files.group(1) if files else 0))  # cached files can be evicted
    return free
