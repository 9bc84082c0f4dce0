"""The numbers of a plan as lines, each with its unit and its formula: in letters, and with the numbers in them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .buckets import MIB
from .network import GB
from .plan import Plan, units


class Line(NamedTuple):
    """One number of a plan.

    Attributes:
        label: What it is; indented if it is a part of what stands above.
        text: The number with its unit.
        formula: Where it comes from.
    """

    label: str
    text: str
    formula: str


def lines(plan: Plan) -> list[Line]:
    """Gives the numbers in the order in which they are shown."""
    return [*_memory_lines(plan), *_batch_lines(plan), *_bucket_lines(plan), *_traffic_lines(plan)]


def assumptions(plan: Plan) -> list[str]:
    """Says in words what is taken for granted."""
    given = plan.job.assumptions
    passes = {"forward": "the forward alone", "backward": "the backward alone", "both": "forward and backward"}
    return [
        passes[given.passes],
        f"collectives of different axes {'at the same time' if given.overlapped_axes else 'one after the other'}",
        f"r(n) = {'(n-1)/n' if given.ring_factors else '1'} of a buffer sent",
        f"{given.element_bytes:g} bytes an element as it travels and is kept",
        "{:g} + {:g} + {:g} + {:g} bytes a parameter (value, gradient, optimizer, sum of micro-batches)".format(
            *plan.job.per_parameter
        ),
    ]


def symbols(plan: Plan) -> dict[str, str]:
    """Gives the letters of the formulas with their values."""
    job, workload = plan.job, plan.job.workload
    machine = job.cluster.machine(*job.ranks[:2])
    x, _, r = job.ranks
    return {
        "N": f"{job.cluster.num_devices} devices",
        "X": f"{x} ranks that gather parameters",
        "Y": f"{job.tp} ranks that cut each matrix",
        "R": f"{r} ranks that sum gradients",
        "B": f"{plan.tokens:,} tokens",
        "K": f"{plan.num_microbatches} micro-batches",
        "P": f"{workload.num_params:,} parameters",
        "e": f"{job.assumptions.element_bytes:g} bytes an element",
        "f": f"{workload.flops_per_token:,} FLOP a token and forward",
        "A": f"{workload.summed_per_token:,} elements a token that tensor parallelism sums",
        "C": f"{job.cluster.flops_per_s:g} FLOP/s",
        "W_X": f"{machine.fsdp_bytes_per_s / GB:g} GB/s",
        "W_Y": f"{machine.tp_bytes_per_s / GB:g} GB/s",
        "W_R": f"{(machine.dp_bytes_per_s or machine.fsdp_bytes_per_s) / GB:g} GB/s",
    }


def notes(plan: Plan) -> list[str]:
    """Says what a reader should know beside the numbers."""
    job, cluster, found = plan.job, plan.job.cluster, []
    if cluster.torus and not cluster.axes(*job.ranks[:2]).is_exact:
        found.append(
            f"groups of {job.fsdp} and {job.tp} are no products of whole axes of "
            f"{'x'.join(map(str, cluster.torus))}: how many axes each has is taken for granted, see --fsdp-axes"
        )
    if any(side < 4 for side in cluster.torus):
        found.append("axes of fewer than 4 chips have no links round their ends: communication is slower than assumed")
    if job.gathers and plan.num_microbatches > 1:
        found.append("every micro-batch gathers, so each has to be as large as a compute-bound batch")
    if not job.gathers and job.num_data_ranks > 1 and job.assumptions.passes == "forward":
        found.append("gradients are summed in the backward, which is left out")
    return found


def _memory_lines(plan: Plan) -> list[Line]:
    job, found = plan.job, plan.bytes_per_device
    available = job.cluster.memory_bytes
    spare = available - plan.total_bytes
    verdict = f"yes, {_gb(spare)} to spare" if plan.fits else f"no, {_gb(-spare)} too much"
    p, g, k, a = job.per_parameter
    each, e = f"{job.workload.num_params:,} parameters / {job.tp}", job.assumptions.element_bytes

    def shared(stage: int) -> str:
        return f" / {job.fsdp} ranks" if job.stage >= stage else ""

    kept = f"{job.workload.kept_per_token:,} + {job.workload.kept_cut_per_token:,} / {job.tp} elements a token"
    formulas = {
        "parameters": f"{p:g} bytes x {each}{shared(3)}",
        "gradients": f"{g + a:g} bytes x {each}{shared(2)}",
        "optimizer_state": f"{k:g} bytes x {each}{shared(1)}",
        "gathered_parameters": f"{e:g} bytes x the {job.num_gathered_units} largest neighbouring units / {job.tp}"
        if job.gathers
        else "nothing is gathered",
        "gradient_buckets": "the largest bucket, before it is reduced",
        "activations": f"{e:g} bytes x ({kept}) x {plan.tokens:,} tokens / ({job.num_data_ranks} data ranks x "
        f"{plan.num_microbatches} micro-batches)",
    }
    steps, least = plan.accumulation_steps, plan.min_devices
    return [
        Line("fits", f"{verdict}: {_gb(plan.total_bytes)} of {_gb(available)} a device", "the sum of what follows"),
        *(Line(f"  {name.replace('_', ' ')}", _gb(found[name]), formulas[name]) for name in found),
        Line("accumulation steps", "none fit" if steps is None else str(steps),
             "by hand, or the fewest K with all else + activations / K < memory"),
        Line("least devices", "none" if least is None else f"{least:,}",
             f"{job.tp} x (floor(what ranks share / (memory - what each has whole)) + 1), at this micro-batch a rank"),
    ]  # fmt: skip


def _batch_lines(plan: Plan) -> list[Line]:
    job, times, best = plan.job, plan.times, plan.best_split
    overlapped = job.assumptions.overlapped_axes
    compute, gather, cut, replicas = job.assumptions.multiples
    one, tp_one = (float(each) * plan.num_microbatches / plan.tokens for each in (times.compute_s, times.tp_s))
    fixed = f"{float(times.fsdp_s):.4g} s, {float(times.dp_s):.4g} s"
    bound = (
        f"max(FSDP, DP) / compute of a token = max({fixed}) / {one:.4g} s, where TP takes less: {tp_one:.4g} s"
        if overlapped
        else f"sum(FSDP, DP) / (compute - TP of a token) = sum({fixed}) / ({one:.4g} - {tp_one:.4g} s)"
    )
    dp_formula = f"{_times(2 * replicas)}e P r(R) / (X Y W_R)" if replicas else "not in the forward"
    return [
        Line("compute-bound", f"{'yes' if plan.compute_bound else 'no'}: {_from(plan.min_tokens)}", bound),
        Line("  compute", f"{_ms(times.compute_s)} a micro-batch", f"{_times(compute)}f B / (K N C)"),
        Line("  FSDP", _ms(times.fsdp_s), f"{_times(gather)}e P r(X) / (Y W_X)"),
        Line("  TP", _ms(times.tp_s), f"{_times(2 * cut)}e A B r(Y) / (K X R W_Y)"),
        Line("  DP", _ms(times.dp_s), dp_formula),
        Line("  communication", _ms(times.communication_s(job.assumptions)),
             f"{'max' if overlapped else 'sum'}(FSDP, TP, DP)"),
        Line("best split", f"FSDP {best.fsdp} x TP {best.tp}: {_from(best.tokens)}",
             "the smallest compute-bound batch over all X Y = N, R = 1"),
    ]  # fmt: skip


def _bucket_lines(plan: Plan) -> list[Line]:
    if (buckets := plan.buckets) is None:
        return [Line("best bucket", "none: no gradient travels", "there is one data rank")]
    found = [
        Line("best bucket", f"cap of {buckets.cap_mb:.4g} MiB: {buckets.num_buckets} buckets of up to "
             f"{buckets.largest_bytes / MIB:.4g} MiB, {_ms(buckets.tail_s)} exposed after the backward",
             "the least max over k of (ready_k + send_k + ... + send_n) - backward, over caps of 1 MiB to 8 GiB, with "
             f"send = bytes / ({buckets.bytes_per_s / GB:.4g} GB/s) + {buckets.latency_s * 1e6:g} us, backward = "
             f"{_ms(buckets.backward_s)}"),
    ]  # fmt: skip
    if (equal := buckets.equal) is not None:
        found.append(
            Line(
                "  if buckets were equal",
                f"{equal.bucket_bytes / MIB:.4g} MiB, {equal.regime}",
                "s / n, n = max(1, sqrt(C/o), (C - s/w)/o) with s all bytes, C the backward, o and w as above",
            )
        )
    return found


def _traffic_lines(plan: Plan) -> list[Line]:
    job = plan.job
    found = [Line("traffic", "that a rank sends to ranks with other tokens, a step, under", "what follows")]
    for name, num_bytes in plan.traffic_bytes.items():
        gradients, parameters = units(name, plan.num_microbatches)
        formula = (
            f"({gradients} for gradients + {parameters} for parameters) x {job.assumptions.element_bytes:g} bytes x "
            f"{job.workload.num_params:,} / {job.tp} x {job.num_data_ranks - 1}/{job.num_data_ranks}"
        )
        found.append(Line(f"  {name.replace('_', ' ')}", _gb(num_bytes), formula))
    return found


def _from(min_tokens: float | None) -> str:
    if min_tokens is None:
        return "no batch is large enough"
    return f"from {math.ceil(min_tokens):,} tokens on" if min_tokens else "at any batch"


def _times(count: int) -> str:
    return "" if count == 1 else f"{count} "


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= 1e7 or num_bytes == 0 else f"{num_bytes / 1e6:.3g} MB"


def _ms(seconds: Any) -> str:
    return f"{float(seconds) * 1e3:.4g} ms"
