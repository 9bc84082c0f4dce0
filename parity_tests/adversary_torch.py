"""Random lives of torchref's wrappers, against one process: every rank ends with the right weights, or is refused.

A life is a sequence of operations on a wrapped module. The reference, on the same rank, has the whole batch of each
pass and adds up what torch would: gradients of passes, divided by a synchronisation, used by a step, cleared. It keeps
the buffers of each rank, which are rank 0's after a synchronisation.
"""

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchref

WRAPPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "naive": (torchref.NaiveDDP, {}),
    "flat": (torchref.FlatDDP, {}),
    "overlapped": (torchref.OverlappedDDP, {}),
    "bucketed": (torchref.BucketedDDP, {"bucket_mb": 1e-4}),
    "zero1": (torchref.ZeRO1, {"bucket_mb": 1e-4}),
    "zero2": (torchref.ZeRO2, {"bucket_mb": 1e-4}),
    "zero3": (torchref.FSDP, {}),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),  # larger ones diverge, and rounding errors grow with them
    # Before a batch norm gradients of biases are rounding errors, which the default eps would make steps of.
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}),
    "fused adamw": (torch.optim.AdamW, {"lr": 0.05, "eps": 1e-3, "fused": True}),
}
CLEARS = ("clear", "clear by optimizer", "clear by module")
# What may come beside passes, synchronisations and steps in their order, and how often; the first may be refused.
MAY_BE_REFUSED = (
    *("drop", "failure", "look", "evaluate", "freeze", "unfreeze", "extra finish", "step too early"),
    *("clip", "clip by torch", "scale", "hook", "stray", "clear a part"),
    *("halve by hooks", "read outside", "initialise", "another order"),
)
EVENTS = (*MAY_BE_REFUSED, "load state", "quiet pass", "clamp", *CLEARS)
MAX_NORM = 0.5
TOLERANCE = 1e-12  # of a tensor's largest weight, if that is above 1


def draw(seed: int) -> tuple[str, str, int, list[str]]:
    """Draws a wrapper, an optimizer, a number of ranks and a sequence of operations."""
    rng = np.random.default_rng(seed)
    wrapper = str(rng.choice(list(WRAPPERS)))
    optimizer = str(rng.choice([*OPTIMIZERS, *(() if wrapper.startswith(("zero1", "zero2")) else ("by hand",))]))
    life: list[str] = []
    for _ in range(int(rng.integers(2, 5))):
        if rng.random() < 0.8:  # else gradients add up over steps
            life.append(str(rng.choice(CLEARS, p=[0.5, 0.25, 0.25])))
        for _ in range(int(rng.integers(0, 3))):
            life.append("quiet pass")
        life += ["pass", "finish", "step"]
    for _ in range(int(rng.integers(0, 3))):
        life.insert(int(rng.integers(len(life) + 1)), str(rng.choice(EVENTS)))
    if "halve by hooks" in life:  # each halves all that has added up, so nothing adds up over passes
        life = [one for op in life if op != "quiet pass" for one in (("clear", op) if op == "pass" else (op,))]
    num_ranks = int(rng.choice([1, 2, 2, 3]))
    if num_ranks == 1 and wrapper != "zero3":  # whose gradients are whole: no step is too early
        life = [operation for operation in life if operation not in ("step too early", "stray")]
    return wrapper, optimizer, num_ranks, life


def describe(seed: int) -> str:
    """Says a case in one line."""
    wrapper, optimizer, num_ranks, life = draw(seed)
    return f"torch seed {seed}: {wrapper} on {num_ranks}, {optimizer}: {', '.join(life)}"


def check_on_rank(seed: int) -> str | None:
    """Lives a life on this rank.

    Returns:
        What is wrong, in one line; None if the weights are right, or it was refused where it may be.
    """
    name, optimizer, num_ranks, life = draw(seed)
    is_plain = not set(life) & set(MAY_BE_REFUSED) and _is_in_order(life)
    run = _Run(seed, name, optimizer, num_ranks)
    try:
        for operation in life:
            run.do(operation)
            if operation == "step" and (wrong := run.difference()):
                return wrong
    except AssertionError as error:
        return str(error) or f"{error!r} in {operation!r}"
    except (RuntimeError, ValueError) as error:
        if "\n" in str(error):
            return f"refused in more than a line: {error}"
        return f"refused: {error}" if is_plain else None
    return None


def _is_in_order(life: list[str]) -> bool:
    kept = ["clear" if one in CLEARS else one for one in life if one not in ("load state", "clamp")]
    return all(
        before in allowed
        for before, one in zip(["step", *kept], kept, strict=False)
        for allowed in [
            {"clear": ("step",), "finish": ("pass",), "step": ("finish",)}.get(one, ("clear", "quiet pass"))
        ]
    )


class _Recomputed(torch.autograd.Function):
    """Computes a layer again in the backward, which calls backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        y.backward(grads[0])
        return x.grad, None


class _Model(nn.Module):
    """Linear layers that FSDP shards, two of equal shape, a norm that it does not, and a layer that is not used.

    Attributes:
        within: How a layer's backward is one within another: ``"checkpoint"``, ``"function"`` or not at all.
        is_swapped: Whether the layers of equal shape come in the other order.
        reads: Whether the forward reads the bias of a layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.unused = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.within, self.is_swapped, self.reads = "", False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.up(x)))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Layers after the norm."""
        first, second = (self.right, self.left) if self.is_swapped else (self.left, self.right)
        hidden = torch.tanh(first(hidden))
        if self.within == "checkpoint":
            hidden = checkpoint(second, hidden, use_reentrant=True)
        elif self.within == "function":
            hidden = _Recomputed.apply(hidden, second)
        else:
            hidden = second(hidden)
        result = self.down(torch.tanh(hidden))
        return result + self.down.bias.detach() if self.reads else result


class _Buffers(_Model):
    """With running statistics, with and without a counter, and a buffer that rows of one rank may change."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = nn.BatchNorm1d(5)
        self.mean: torch.Tensor
        self.var: torch.Tensor
        self.num_large: torch.Tensor
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))
        self.register_buffer("num_large", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1.5:
            self.num_large = self.num_large + 1
        hidden = F.batch_norm(self.stats(self.norm(self.up(x))), self.mean, self.var, training=self.training)
        return self.head(hidden * (1 + 0.1 * self.num_large))


class _ByHand:
    """Steps without an optimizer of torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.02)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class _Run:
    """A wrapped module, and its reference."""

    def __init__(self, seed: int, name: str, optimizer: str, num_ranks: int) -> None:
        self.rng, self.num_ranks, self.rank = np.random.default_rng((seed, 1)), num_ranks, dist.get_rank()
        torch.manual_seed(seed)
        model = _Buffers if self.rng.integers(2) else _Model
        self.reference: Any = model().double()
        module = model().double()
        module.load_state_dict(self.reference.state_dict())
        module.within = str(self.rng.choice(["", "checkpoint", "function"]))
        self.is_swapped = self.is_halved = False
        self.buffers = [self._buffers_of(self.reference)] * num_ranks
        wrapper, options = WRAPPERS[name]
        self.is_sharded = name == "zero3"  # finishes its gradients on one rank, too
        self.optimizer: Any
        self.reference_optimizer: Any
        if optimizer == "by hand":
            self.net = wrapper(module, **options)
            self.optimizer, self.reference_optimizer = _ByHand(self.net.parameters()), _ByHand(self._parameters())
        else:
            cls, given = OPTIMIZERS[optimizer]
            owns = name.startswith(("zero1", "zero2"))
            given = given if "fused" in given else {**given, "foreach": False}
            is_first = not owns and bool(self.rng.integers(2))  # made before wrapping
            before = cls(_groups(module), **given) if is_first else None
            if owns:
                self.net = wrapper(module, **options, optimizer_cls=cls, params=_groups(module), **given)
            else:
                self.net = wrapper(module, **options)
            self.optimizer = self.net if owns else before or cls(_groups(module), **given)
            self.reference_optimizer = cls(_groups(self.reference), **given)
        self.saved: list[Any] = []  # the optimizers' states after the first step
        self.pending: list[Any] = []  # gradients of passes that no synchronisation has followed
        self.has_strayed = False  # by a step on gradients of this rank alone, to be refused at the next forward

    def do(self, operation: str) -> None:
        """Does one operation on both sides."""
        getattr(self, "_" + operation.replace(" ", "_"))()

    def difference(self) -> str | None:
        """Compares the weights and the buffers."""
        if self.has_strayed:
            return None
        found, right = self.net.gather_full_params(), dict(self.reference.named_parameters())
        right |= self.buffers[self.rank]
        found |= dict(self.net.module.named_buffers())
        furthest = max(
            float((found[name] - right[name]).detach().abs().max() / right[name].detach().abs().max().clamp(min=1))
            for name in right
        )
        return None if furthest <= TOLERANCE else f"weights are {furthest:.1e} off"

    def _parameters(self) -> list[nn.Parameter]:
        return list(self.reference.parameters())

    def _buffers_of(self, module: nn.Module) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in module.named_buffers()}

    def _rows(self) -> list[torch.Tensor]:
        return [torch.from_numpy(self.rng.normal(size=(4, 3))) for _ in range(self.num_ranks)]

    def _reference_loss(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The mean over ranks, each with its own buffers, which the forward changes."""
        losses = []
        for rank, x in enumerate(rows):
            for name, buffer in self.buffers[rank].items():
                parent, _, last = name.rpartition(".")
                setattr(self.reference.get_submodule(parent), last, buffer.clone())
            self.reference.is_swapped = self.is_swapped and rank == self.num_ranks - 1
            losses.append(self.reference(x).square().sum())
            self.buffers[rank] = self._buffers_of(self.reference)
        return torch.stack(losses).mean()

    def _pass(self) -> None:
        rows = self._rows()
        loss = self.net(rows[self.rank]).square().sum()
        if self.has_strayed:
            raise AssertionError("a step on gradients of one rank was not refused at the next forward")
        loss.backward()
        trained = [one for one in self._parameters() if one.requires_grad]
        grads = torch.autograd.grad(self._reference_loss(rows), trained, allow_unused=True)
        if self.is_halved:
            grads = tuple(grad if grad is None else grad / 2 for grad in grads)
        self.pending.append(list(zip(trained, grads, strict=True)))

    def _quiet_pass(self) -> None:
        with self.net.no_sync():
            self._pass()

    def _finish(self) -> None:
        self.net.finish_gradient_synchronization()
        self._take_pending()
        self.buffers = [self.buffers[0]] * self.num_ranks
        for parameter in self._parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _take_pending(self) -> None:
        for parameter, grad in (pair for one in self.pending for pair in one):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self.pending = []

    def _step(self) -> None:
        had_gradients = any(parameter.grad is not None for parameter in self.net.parameters())
        self.optimizer.step()
        if self.num_ranks == 1 and self.optimizer is not self.net and not self.is_sharded:  # none is needed
            self._take_pending()
        if not self.pending:
            self.reference_optimizer.step()
            self.saved = self.saved or [copy.deepcopy(one.state_dict()) for one in self._optimizers()]
        elif isinstance(self.optimizer, _ByHand):
            self.has_strayed = had_gradients
        else:
            raise AssertionError("an optimizer's step on gradients of one rank was not refused")

    def _clear(self) -> None:
        self._clear_by(self.net)

    def _clear_by_optimizer(self) -> None:
        self._clear_by(self.optimizer)

    def _clear_by_module(self) -> None:
        self._clear_by(self.net.module)

    def _clear_by(self, one: Any) -> None:
        one.zero_grad()
        self.reference_optimizer.zero_grad()
        self.pending = []

    def _clear_a_part(self) -> None:
        """By the part's own zero_grad: right, or refused where a gradient is on its way already."""
        for module in (self.net.module, self.reference):
            module.down.zero_grad()
        part = {id(parameter) for parameter in self.reference.down.parameters()}
        self.pending = [[pair for pair in one if id(pair[0]) not in part] for one in self.pending]

    def _optimizers(self) -> list[Any]:
        if isinstance(self.optimizer, _ByHand):
            return []
        return [getattr(self.optimizer, "optimizer", self.optimizer), self.reference_optimizer]

    def _load_state(self) -> None:
        """Goes back to the optimizers' states after the first step."""
        for optimizer, state in zip(self._optimizers(), copy.deepcopy(self.saved), strict=bool(self.saved)):
            optimizer.load_state_dict(state)

    def _drop(self) -> None:
        self._pass()
        self._clear_by_optimizer()

    def _stray(self) -> None:
        """A step by hand on local gradients, where there are any, which the next forward is to refuse."""
        self._pass()
        local = [one for one in self.net.module.parameters() if one.grad is not None]
        _ByHand(local).step()
        self.has_strayed = bool(local)
        _ByHand(local).zero_grad()
        self._pass()

    def _failure(self) -> None:
        rows = self._rows()
        try:
            self.net(_Fails.apply(rows[self.rank].clone().requires_grad_())).sum().backward()
        except ZeroDivisionError:
            pass
        self._reference_loss(rows)
        self._clear()

    def _look(self) -> None:
        rows = self._rows()
        self.net(rows[self.rank])
        self._reference_loss(rows)

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._look()

    def _freeze(self) -> None:
        self.net.module.up.requires_grad_(False)
        self.reference.up.requires_grad_(False)

    def _unfreeze(self) -> None:
        self.net.module.up.requires_grad_(True)
        self.reference.up.requires_grad_(True)

    def _clip(self) -> None:
        self.net.clip_grad_norm_(MAX_NORM)
        self._clip_reference(0.0)

    def _clip_by_torch(self) -> None:
        """Of what is there: right, or refused."""
        nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        self._clip_reference(1e-6)

    def _clip_reference(self, epsilon: float) -> None:
        if self.pending and self.num_ranks > 1:
            raise AssertionError("clipping of gradients of one rank was not refused")
        self._take_pending()
        grads = [one.grad for one in self._parameters() if one.grad is not None]
        if grads:
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            for grad in grads:
                grad.mul_(min(1.0, MAX_NORM / max(float(norm) + epsilon, MAX_NORM)))

    def _scale(self) -> None:
        """Halves what is there: right, or refused where it is on its way already."""
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self.pending = [[(one, grad if grad is None else grad / 2) for one, grad in pairs] for pairs in self.pending]
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / 2

    def _hook(self) -> None:
        """Clips before each step from now on; of an optimizer over shards that is refused at the step."""
        for optimizer in self._optimizers():
            optimizer.register_step_pre_hook(_clip_all)

    def _halve_by_hooks(self) -> None:
        """By hooks on the parameters, which come before the sums over ranks, or are refused."""
        if not self.pending and not self.is_halved:
            for parameter in self.net.module.parameters():
                parameter.register_post_accumulate_grad_hook(_halve)
            self.is_halved = True

    def _read_outside(self) -> None:
        """A parameter outside of its module's forward, from now on."""
        self.net.module.reads = self.reference.reads = True
        self._look()

    def _initialise(self) -> None:
        """Equally on all ranks."""
        for module in (self.net.module, self.reference):
            nn.init.normal_(module.up.weight, generator=torch.Generator().manual_seed(3))

    def _clamp(self) -> None:
        """As a WGAN: a gradient of inputs alone, and weights cut by ``data``, of which no version counter tells."""
        for module in (self.net.module, self.reference):
            x = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
            torch.autograd.grad(module.right(module.left(x)).sum(), x)
            for layer in (module.left, module.right):
                layer.weight.data.clamp_(-0.1, 0.1)

    def _another_order(self) -> None:
        """The last rank uses layers of equal shape in another order, from now on."""
        self.is_swapped = True
        self.net.module.is_swapped = self.rank == self.num_ranks - 1

    def _extra_finish(self) -> None:
        self._finish()

    def _step_too_early(self) -> None:
        self._pass()
        self._step()


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """Groups by number of dimensions: only matrices decay."""
    params = list(module.parameters())
    others = [one for one in params if one.dim() < 2]
    return [{"params": [one for one in params if one.dim() >= 2]}, {"params": others, "weight_decay": 0.0}]


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


def _clip_all(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], MAX_NORM)
