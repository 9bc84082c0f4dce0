"""A training run in PyTorch: each strategy's own copy, and those of torch's own data parallelism.

Of torch's own, DistributedDataParallel alone runs without communication, by a hook that sends nothing. They do not sum
the loss over ranks, as the strategies of this project do.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import torchref
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models import build as build_in_jax
from torchref.communication.collectives import record, silent
from torchref.interop import from_numpy
from torchref.models import build, loss_fn
from torchref.registry import make_training
from torchref.train import local_rows

from ..ranks import Ranks
from .setup import PEERS, Run, StrategySpec, TrainingSetup


class TorchSide:
    """Torch's variants on this rank, from the same weights and batches."""

    num_compilers = 1

    def __init__(self, ranks: Ranks, setup: TrainingSetup) -> None:
        self.setup, self.on_gpu = setup, ranks.kind == "gpus"
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        torch.set_float32_matmul_precision("high" if setup.dtype == "tf32" else "highest")
        if "jaxddp" not in setup.frameworks:  # this process has no other use of JAX, whose weights these are
            jax.config.update("jax_platforms", "cpu")
        start = from_numpy(to_numpy(build_in_jax(setup.model)[1]), build(setup.model)).to(device)
        self.module = start.to(torch.bfloat16) if setup.dtype == "bf16" else start
        self.batches = [{name: torch.from_numpy(one).to(device) for name, one in b.items()} for b in setup.batches]
        self.rows = [local_rows(batch, dist.get_rank(), ranks.num) for batch in self.batches]
        # One kernel for all parameters, as XLA makes of optax's.
        self.adamw: dict[str, Any] = {"lr": setup.learning_rate, "weight_decay": 0.01, "fused": True}

    def start(self, spec: StrategySpec, *, sends: bool) -> Callable[[], Run]:
        """Makes a run, and gives it: there is nothing to compile."""
        module = copy.deepcopy(self.module)
        if spec.name in PEERS["torchref"]:
            run = self._peer(spec, module, sends=sends)
        else:
            net, optimizer = make_training(spec.name, module, torch.optim.AdamW, spec.options, **self.adamw)
            run = self._run(net, optimizer, self.rows, sends=sends)
        return lambda: run

    def reference(self) -> Run:
        """Training on this rank alone."""
        module = copy.deepcopy(self.module)
        optimizer = torch.optim.AdamW(module.parameters(), **self.adamw)
        num_parts = self.setup.ranks.num  # as many examples at once as a rank has, so that it needs no more memory
        return self._run(module, optimizer, self.batches, num_microbatches=num_parts)

    def _run(
        self, net: Any, optimizer: Any, batches: Sequence[Any], *, sends: bool = True, num_microbatches: int = 1
    ) -> Run:
        trainer = torchref.Trainer(loss_fn, optimizer, net, num_microbatches=num_microbatches)
        parallel = isinstance(net, torchref.DataParallel)
        found: list[tuple[str, int]] = []  # by the first step

        def step(index: int) -> tuple[float, float]:
            with record() as issued, contextlib.nullcontext() if sends else silent():
                metrics = trainer.step(batches[index])
            self.wait()
            found[:] = found or [(one.kind, one.num_bytes) for one in issued]
            return float(metrics["loss"]), float(metrics["grad_norm"])

        def weights() -> dict[str, np.ndarray]:
            return _in_float32(net.gather_full_params() if parallel else net.state_dict())

        return Run(step, weights, net.planned_collectives() if parallel else [], found)

    def _peer(self, spec: StrategySpec, module: nn.Module, *, sends: bool) -> Run:
        """A peer in the loop that torch's documentation shows; its loss is this rank's."""
        net: Any = module
        if spec.name == "fully_shard":
            from torch.distributed.fsdp import fully_shard  # takes most of a second

            for layer in getattr(module, "layers", ()):
                fully_shard(layer)
            fully_shard(module)  # in place
        else:
            # The cheaper of its two ways to hold gradients.
            net = DistributedDataParallel(module, bucket_cap_mb=spec.bucket_mb, gradient_as_bucket_view=True)
            if not sends:
                net.register_comm_hook(None, noop_hook)
        if spec.name == "torch.compile":
            import torch._inductor.config as inductor

            torch._logging.set_logs(all=logging.ERROR)
            inductor.compile_threads = 1  # in this process: workers could outlive it
            net = torch.compile(net)
        if spec.name == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own past when it is imported

            optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **self.adamw)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), **self.adamw)

        def step(index: int) -> tuple[float, float]:
            optimizer.zero_grad()
            loss = loss_fn(net, self.rows[index])
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
            optimizer.step()
            self.wait()
            return float(loss.detach()), float(_whole(norm))

        def weights() -> dict[str, np.ndarray]:
            return _in_float32({name: _whole(one.detach()) for name, one in module.named_parameters()})

        return Run(step, weights)

    def wait(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


def _in_float32(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies tensors to NumPy, which has no bfloat16."""
    copies = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
    return {name: tensor.contiguous().numpy() for name, tensor in copies.items()}


def _whole(tensor: Any) -> torch.Tensor:
    """All of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
