"""A GPT with mixed precision, a loss scaler, ``torch.compile``, gradient accumulation, clipping and a decay of groups.

In float64, which autocast leaves as it is; the compiler traces forward and backward and generates no machine code.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.train import local_rows

STRATEGIES = ("overlapped", "bucketed")
WIDTH, NUM_HEADS, CONTEXT, VOCABULARY, NUM_MICROBATCHES = 16, 2, 8, 32, 2


class Block(nn.Module):
    """Attention and a feed-forward, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv, self.out = (nn.Linear(WIDTH, width, bias=False) for width in (3 * WIDTH, WIDTH))
        up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next activations, ``[n, length, width]``."""
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """Two blocks; the head's matrix is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH, bias=False))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        logits = self.blocks(self.tokens(tokens) + self.places.weight) @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model() -> tuple[GPT, list[Any]]:
    """The model in float64, and the groups of its optimizer."""
    torch.manual_seed(0)
    model = GPT().double()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return model, [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def data() -> list[torch.Tensor]:
    """Global batches of text."""
    return list(torch.randint(VOCABULARY, (4, 16, CONTEXT + 1), generator=torch.Generator().manual_seed(0)))


def before(batches: Any) -> Any:
    """In one process."""
    model, groups = make_model()
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu")
    net = torch.compile(model, backend="aot_eager")
    for batch in batches:
        for piece in batch.chunk(NUM_MICROBATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(piece[:, :-1], piece[:, 1:]) / NUM_MICROBATCHES
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


def after(batches: Any, wrap: Callable[..., torchref.DataParallel]) -> Any:
    """On all ranks."""
    model, groups = make_model()
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu")
    net = wrap(torch.compile(model, backend="aot_eager"))
    for batch in batches:
        mine = local_rows(batch, dist.get_rank(), dist.get_world_size())
        for index, piece in enumerate(mine.chunk(NUM_MICROBATCHES)):
            net.require_backward_grad_sync = index == NUM_MICROBATCHES - 1
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(piece[:, :-1], piece[:, 1:]) / NUM_MICROBATCHES
            scaler.scale(loss).backward()
        net.finish_gradient_synchronization()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()
