"""What the programs of both frameworks' ranks share: their arguments, model and events. No framework is imported.

As a program it starts the ranks, as ``python -m jaxddp train --processes`` does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

from jaxddp.cli.launch import launch
from jaxddp.sizes import TransformerConfig

MODEL = TransformerConfig(vocab=256, context=64, width=128, num_layers=1, num_heads=4, hidden=512)
BATCH_SIZE = 8
STUCK_S = 10.0  # longer than a step or a save takes on a busy machine
ENDLESS = 10**9  # steps


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        module: Of the ranks.
        is_watched: Whether it has this project's launcher and watchdog, or torchrun alone.
        events: Path of a named pipe.
        checkpoint: Folder.
        checkpoint_every: Steps; 0 for only at the end.
        step_s: Least seconds of a step, the rest of which is slept, as a host sleeps while an accelerator computes.
    """

    module: str
    num_ranks: int
    is_watched: bool
    events: str
    checkpoint: str
    checkpoint_every: int
    log_dir: str
    steps: int = ENDLESS
    step_s: float = 0.0
    max_restarts: int = 0
    seed: int = 0

    @property
    def command(self) -> list[str]:
        """What starts all ranks."""
        arguments = ["-m", self.module, json.dumps(dataclasses.asdict(self))]
        if self.is_watched:
            return [sys.executable, "-m", __spec__.name, *arguments[1:]]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_ranks}"]
        return [sys.executable, *torchrun, f"--max-restarts={self.max_restarts}", *arguments]


class Events:
    """Tells the soak what a rank does, and keeps the pace of its steps."""

    def __init__(self, program: Program) -> None:
        """Opens the pipe."""
        self._pipe, self._step_s = os.open(program.events, os.O_WRONLY), program.step_s
        self._rank, self._next_s = int(os.environ["RANK"]), 0.0
        self.write("started")

    def write(self, kind: str, **fields: Any) -> None:
        """Writes an event in one piece, so that none is cut off by a kill."""
        event = {"at_s": time.monotonic(), "kind": kind, "rank": self._rank, "pid": os.getpid(), **fields}
        os.write(self._pipe, json.dumps(event).encode() + b"\n")

    def step(self, step: int, save_s: float) -> None:
        """Tells of a step, and of the time for which it was held up by a save; waits until the next may begin."""
        self.write("step", step=step, save_s=save_s)
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._step_s


def parse() -> Program:
    """The program that the command line's last argument describes."""
    return Program(**json.loads(sys.argv[-1]))


if __name__ == "__main__":
    asked = parse()
    sys.exit(launch(["-m", *sys.argv[1:]], asked.num_ranks, None, asked.max_restarts))
