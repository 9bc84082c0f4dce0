"""The output of ``plan``: lines of numbers with units and, on request, formulas; or one JSON object.

With ``--verify`` a table of planned and compiled bytes follows. A training of one's own has a line for each ZeRO stage.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ..communication.buckets import MIB
from ..network import GB
from ..planning.plan import BucketChoice, Plan, strategy_traffic

if TYPE_CHECKING:  # imports JAX, which a plan alone does not need
    from collections.abc import Iterable, Sequence

    from ..instruments.stages import StagePlan
    from ..instruments.verify import Row, Verification
    from ..planning.chips import Target

_LABEL_WIDTH = 25
_NUMBER_WIDTH = 20
_WIDTH = 120
_STAGE_WIDTH, _BYTES_WIDTH = 17, 17


class Line(NamedTuple):
    """One number of a plan and its formula; the label is indented if the number is a part of the one above."""

    label: str
    text: str
    formula: str


def show(plan: Plan, model: str, *, explain: bool = False, file: TextIO | None = None) -> None:
    """Writes a plan; with ``explain``, the formula of each number follows it."""
    file = file or sys.stdout
    job = plan.job
    replicas = f" x {job.dp} replicas" if job.dp > 1 else ""
    how = f"FSDP {job.fsdp}" if job.stage == 3 else f"ZeRO stage {job.stage} over {job.fsdp} ranks"
    print(f"{model} on {job.cluster.name}: {how} x TP {job.tp}{replicas}, {plan.tokens:,} tokens a step", file=file)
    print(textwrap.fill(f"Assumed: {'; '.join(_assumptions(plan))}.", _WIDTH), file=file)
    if explain:
        letters = "; ".join(f"{letter} = {value}" for letter, value in symbols(plan).items())
        print(textwrap.fill(f"Letters: {letters}.", _WIDTH), file=file)
    print(file=file)
    for line in lines(plan):
        print(f"{line.label:<{_LABEL_WIDTH}}{line.text}", file=file)
        if explain:
            margin = " " * _LABEL_WIDTH
            print(textwrap.fill(f"= {line.formula}", _WIDTH, initial_indent=margin, subsequent_indent=f"{margin}  "),
                  file=file)  # fmt: skip
    for note in _notes(plan):
        print(f"Note: {note}.", file=file)


def show_verification(verification: Verification, file: TextIO | None = None) -> None:
    """Writes planned and compiled bytes as a table; ``file`` is standard output when None."""
    file = file or sys.stdout
    job = verification.plan.job
    print(f"\nCompiled for {job.cluster.name}, bytes of a device:\n", file=file)
    _show_rows(verification.rows, file)
    if verification.refusal is not None:
        print(f"Refused by the compiler: {verification.refusal}.", file=file)
    for note in verification.notes:
        print(f"Note: {note}.", file=file)


def _show_rows(rows: Iterable[Row], file: TextIO) -> None:
    head = (f"{name:>{_NUMBER_WIDTH}}" for name in ("planned", "compiled", "difference"))
    print(f"{'':<{_LABEL_WIDTH}}{''.join(head)}  check", file=file)
    for row in rows:
        numbers = (_digits(row.planned), _digits(row.compiled), _digits(row.difference, "+"))
        cells = "".join(f"{number:>{_NUMBER_WIDTH}}" for number in numbers)
        print(f"{row.label:<{_LABEL_WIDTH}}{cells}  {row.check}".rstrip(), file=file)


def show_stages(plans: Sequence[StagePlan], trainer: str, target: Target, file: TextIO | None = None) -> None:
    """Writes a line for each stage and, where steps were compiled, a table for each; ``file`` as above."""
    file = file or sys.stdout
    print(f"{trainer} on {target.spec}: bytes of a device, of {target.chip.memory_bytes:,}\n", file=file)
    names = ("parameters", "gradients", "optimizer state", "in all", "sent a step")
    print(f"{'stage':<{_STAGE_WIDTH}}{''.join(f'{name:>{_BYTES_WIDTH}}' for name in names)}  collectives", file=file)
    for plan in plans:
        label = f"{plan.stage} {plan.strategy}"
        numbers = (plan.parameters, plan.gradients, plan.optimizer_state, plan.total, plan.sent_bytes)
        cells = "".join(f"{round(number):>{_BYTES_WIDTH},}" for number in numbers)
        counts = Counter(kind for kind, _ in plan.collectives)
        calls = ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none"
        print(
            f"{label:<{_STAGE_WIDTH}}{f'  refused: {plan.refused}' if plan.refused else f'{cells}  {calls}'}", file=file
        )
    for plan in plans:
        if plan.rows:
            print(f"\nStage {plan.stage}, {plan.strategy}, compiled for {target.spec}:\n", file=file)
            _show_rows(plan.rows, file)
        for note in plan.notes:
            print(f"Note: {note}.", file=file)


def stages_as_json(plans: Sequence[StagePlan], trainer: str, target: Target) -> dict[str, Any]:
    """The stages of a training of one's own as an object for ``json.dumps``; ``verify`` is None without compilation."""
    found: dict[str, Any] = {"trainer": trainer, "target": target.spec, "available": target.chip.memory_bytes}
    found["stages"] = [
        {
            "stage": plan.stage,
            "strategy": plan.strategy,
            "refused": plan.refused or None,
            "bytes_per_device": {
                "parameters": plan.parameters,
                "gradients": plan.gradients,
                "optimizer_state": plan.optimizer_state,
                "total": plan.total,
            },
            "sent_bytes_per_step": round(plan.sent_bytes),
            "collectives": [
                {"kind": kind, "bytes": num_bytes, "count": count}
                for (kind, num_bytes), count in sorted(Counter(plan.collectives).items())
            ],
            "verify": {
                "as_planned": plan.holds, "rows": [_row_object(row) for row in plan.rows], "notes": list(plan.notes)
            } if plan.rows else None,
        }
        for plan in plans
    ]  # fmt: skip
    return found


def verification_object(verification: Verification) -> dict[str, Any]:
    """A verification as an object for ``json.dumps``; missing numbers are None."""
    refusal = verification.refusal
    return {
        "tokens": verification.plan.tokens,
        "as_planned": verification.holds,
        "rows": [_row_object(row) for row in verification.rows],
        "collectives": [
            {"kind": kind, "bytes": num_bytes, "ranks": ranks, "count": count}
            for (kind, num_bytes, ranks), count in sorted(verification.collectives.items())
        ],
        "refused": refusal and {key: getattr(refusal, key) for key in ("needed_bytes", "available_bytes")},
        "notes": list(verification.notes),
    }


def as_json(plan: Plan, model: str, *, explain: bool = False) -> dict[str, Any]:
    """A plan, on request with its formulas, for ``json.dumps``: bytes and tokens rounded up, missing answers None."""
    job, buckets, best, given = plan.job, plan.buckets, plan.best_split, plan.job.assumptions
    found: dict[str, Any] = {
        "model": model,
        "target": job.cluster.name,
        "devices": job.cluster.num_devices,
        "fsdp": job.fsdp,
        "tp": job.tp,
        "dp": job.dp,
        "stage": job.stage,
        "params": job.workload.num_params,
        "tokens": plan.tokens,
        "micro_batch": plan.micro_batch,
        "fits": plan.fits,
        "bytes_per_device": {
            **{name: _whole(num_bytes) for name, num_bytes in plan.bytes_per_device.items()},
            "total": _whole(plan.total_bytes),
            "available": _whole(job.cluster.memory_bytes),
        },
        "accumulation_steps": plan.accumulation_steps,
        "min_devices": plan.min_devices,
        "compute_bound": plan.compute_bound,
        "min_tokens": None if plan.min_tokens is None else math.ceil(plan.min_tokens),
        "microbatch_times_s": {name.removesuffix("_s"): float(each) for name, each in plan.times._asdict().items()},
        "best_split": {**best._asdict(), "tokens": math.ceil(best.tokens)},
        "best_bucket_mb": None if buckets is None else buckets.cap_mb,
        "buckets": None if buckets is None else _bucket_object(buckets),
        "traffic_bytes_per_step": {name: _whole(num_bytes) for name, num_bytes in plan.traffic_bytes.items()},
        "assumptions": {
            "passes": given.passes,
            "overlapped_axes": given.overlapped_axes,
            "ring_factors": given.ring_factors,
            "element_bytes": given.element_bytes,
            "state_bytes_per_param": job.held._asdict(),
            "flops_per_s": job.cluster.flops_per_s,
            "link_gb_per_s": job.cluster.link_gb_per_s,
            "latency_us": job.cluster.latency_us,
        },
        "notes": _notes(plan),
    }
    if explain:
        found["formulas"] = {line.label.strip(): f"{line.text} = {line.formula}" for line in lines(plan)}
        found["letters"] = symbols(plan)
    return found


def lines(plan: Plan) -> list[Line]:
    """The numbers of a plan in the order in which they are shown."""
    return [*_memory_lines(plan), *_batch_lines(plan), *_bucket_lines(plan), *_traffic_lines(plan)]


def symbols(plan: Plan) -> dict[str, str]:
    """The letters of the formulas with their values."""
    job, workload = plan.job, plan.job.workload
    rates = job.cluster.rates(*job.ranks[:2])
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
        "W_X": f"{rates.fsdp_bytes_per_s / GB:g} GB/s",
        "W_Y": f"{rates.tp_bytes_per_s / GB:g} GB/s",
        "W_R": f"{(rates.dp_bytes_per_s or rates.fsdp_bytes_per_s) / GB:g} GB/s",
    }


def _assumptions(plan: Plan) -> list[str]:
    given = plan.job.assumptions
    passes = {"forward": "the forward alone", "backward": "the backward alone", "both": "forward and backward"}
    return [
        passes[given.passes],
        f"collectives of different axes {'at the same time' if given.overlapped_axes else 'one after the other'}",
        f"r(n) = {'(n-1)/n' if given.ring_factors else '1'} of a buffer sent",
        f"{given.element_bytes:g} bytes per element sent and kept",
        f"products in {plan.job.cluster.products or 'any dtype'} at {plan.job.cluster.flops_per_s:g} FLOP/s",
        "{:g} + {:g} + {:g} + {:g} bytes a parameter (value, gradient, optimizer, sum of micro-batches)".format(
            *plan.job.held
        ),
    ]


def _notes(plan: Plan) -> list[str]:
    job, cluster, found = plan.job, plan.job.cluster, []
    if cluster.torus and not cluster.axes(*job.ranks[:2]).is_exact:
        found.append(
            f"groups of {job.fsdp} and {job.tp} are not products of whole axes of "
            f"{'x'.join(map(str, cluster.torus))}: the number of axes of each is assumed, see --fsdp-axes"
        )
    if any(side < 4 for side in cluster.torus):
        found.append("axes of fewer than 4 chips have no wrap-around links: communication is slower than assumed")
    if not cluster.torus:
        pool = 0.75 * cluster.memory_bytes
        needs_more = ", which this plan needs" if plan.total_bytes > pool else ""
        found.append(f"JAX takes {_gb(pool)} of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more{needs_more}")
    if job.gathers and plan.num_microbatches > 1:
        found.append("every micro-batch gathers, so each has to be as large as a compute-bound batch")
    if not job.gathers and job.num_data_ranks > 1 and job.assumptions.passes == "forward":
        found.append("gradients are reduced in the backward, which is not counted")
    return found


def _memory_lines(plan: Plan) -> list[Line]:
    job, found = plan.job, plan.bytes_per_device
    available = job.cluster.memory_bytes
    spare = available - plan.total_bytes
    verdict = f"yes, {_gb(spare)} to spare" if plan.fits else f"no, {_gb(-spare)} too much"
    p, g, k, a = job.held
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
             f"{job.tp} x (floor(sharded bytes / (memory - replicated bytes)) + 1), at this micro-batch a rank"),
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
        return [Line("best bucket", "none: no gradients are reduced", "there is one data rank")]
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
    found = [Line("traffic", "bytes that a rank sends per step to data-parallel peers, by strategy", "what follows")]
    for name, num_bytes in plan.traffic_bytes.items():
        gradients, parameters = strategy_traffic(name, plan.num_microbatches)
        formula = (
            f"({gradients} for gradients + {parameters} for parameters) x {job.assumptions.element_bytes:g} bytes x "
            f"{job.workload.num_params:,} / {job.tp} x {job.num_data_ranks - 1}/{job.num_data_ranks}"
        )
        found.append(Line(f"  {name.replace('_', ' ')}", _gb(num_bytes), formula))
    return found


def _bucket_object(buckets: BucketChoice) -> dict[str, Any]:
    equal = buckets.equal
    return {
        "cap_mb": buckets.cap_mb,
        "count": buckets.num_buckets,
        "largest_mb": buckets.largest_bytes / MIB,
        "tail_s": buckets.tail_s,
        "backward_s": buckets.backward_s,
        "bytes_per_s": buckets.bytes_per_s,
        "latency_s": buckets.latency_s,
        "equal_mb": None if equal is None else equal.bucket_bytes / MIB,
        "regime": None if equal is None else equal.regime,
    }


def _row_object(row: Row) -> dict[str, Any]:
    numbers = {"planned": row.planned, "compiled": row.compiled, "difference": row.difference}
    rounded = {name: None if number is None else round(number) for name, number in numbers.items()}
    return {"label": row.label, **rounded, "check": row.check, "as_planned": row.holds}


def _digits(num_bytes: float | None, sign: str = "") -> str:
    if num_bytes is None:
        return "-"
    whole = round(num_bytes)
    return format(whole, f"{sign if whole else ''},")


def _whole(num_bytes: float) -> int:
    """Rounds up, ignoring floating-point noise on a whole number."""
    return math.ceil(num_bytes * (1 - 1e-12))


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
