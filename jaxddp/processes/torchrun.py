"""Under torchrun the agent listens on the job's port: process 0 chooses another one, and tells it through its store."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from .job import Job


def with_free_port(job: Job, timeout_s: float) -> Job:
    """Changes a job's port under torchrun, whose agent listens on it, to one that process 0 finds free."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or job.launcher != "torchrun":
        return job
    from torch.distributed import TCPStore  # torchrun is torch's, so it is there

    store = TCPStore(job.host, job.port, timeout=timedelta(seconds=timeout_s))
    key = f"jaxddp/coordinator/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job.process_id == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(key, str(probe.getsockname()[1]))
    return job._replace(port=int(store.get(key)))
