"""Under torchrun the agent listens on the job's port: process 0 chooses another one, and tells it through its store."""

import os
import secrets
from datetime import timedelta

from .job import Job


def with_free_port(job: Job, timeout_s: float) -> Job:
    """Changes a job's port under torchrun, whose agent listens on it, to a free one, and its token to a new one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or job.launcher != "torchrun":
        return job
    from torch.distributed import TCPStore  # torchrun is torch's, so it is there

    store = TCPStore(job.host, job.port, timeout=timedelta(seconds=timeout_s))
    key = f"jaxddp/coordinator/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job.process_id == 0:
        with job._replace(port=0).listen() as probe:
            store.set(key, f"{probe.getsockname()[1]} {secrets.token_hex(16)}")
    port, token = store.get(key).decode().split()
    return job._replace(port=int(port), token=token)
