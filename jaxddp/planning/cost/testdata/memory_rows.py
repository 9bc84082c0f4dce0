"""Rows on parameters, memory, traffic and batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....models import TransformerConfig
from ..memory import FP32, MIXED, MIXED_ACCUMULATED, STAGES, PerParameter, exact_state_bytes, state_bytes
from ..traffic import traffic
from ..workload import feed_forward, transformer
from . import Row, check_printed, checks
from .closed_forms import num_gathers

MIB, GIB = 2**20, 2**30
XXL = feed_forward(width=16384, hidden=53248, num_blocks=126)
GPT2_VOCAB = 50_257


def sizes_of(vocab: int, d_model: int, d_ff: int, layers: int, heads: int) -> dict[str, Any]:
    """Arguments of ``transformer`` and of ``TransformerConfig``."""
    return {
        "vocab": vocab, "context": 128, "width": d_model, "num_layers": layers, "num_heads": heads, "hidden": d_ff,
    }  # fmt: skip


XL_SIZES = sizes_of(10_000, 768, 3200, 16, 12)
XL = transformer(**XL_SIZES)


@checks("P.xl_seed")
def _(row: Row) -> None:
    ours = XL.num_params
    assert TransformerConfig(**XL_SIZES).num_params == ours
    check_printed({"params": ours, "bytes": 4 * ours, "MiB": 4 * ours / MIB, "tensors": len(XL.tensors)},
                  row["our_value"])  # fmt: skip


@checks("P.handout25")
@checks("P.handout26")
def _(row: Row) -> None:
    for name, printed in row["our_value"].items():
        d_model, d_ff, layers, heads = row["inputs"]["table"][name]
        sizes = sizes_of(row["inputs"]["vocab"], d_model, d_ff, layers, heads)
        model = transformer(**sizes)
        count, embedding = model.num_params, model.unit_params[0]
        assert TransformerConfig(**sizes).num_params == count
        gpt2 = {**sizes, "vocab": GPT2_VOCAB}
        ours = {
            "d_model": d_model,
            "d_ff": d_ff,
            "layers": layers,
            "heads": heads,
            "head_dim": d_model // heads,
            "params": count,
            "non_embedding": count - 2 * embedding,
            "without_tok_emb": count - embedding,
            "fp32_MiB": 4 * count / MIB,
            "fp32_GiB": 4 * count / GIB,
            "fp32_train_state_GiB": state_bytes(count, stage=0).total / GIB,
            "tensors": len(model.tensors),
            "if_two_matrix_ffn": transformer(**sizes, num_matrices=2).num_params,
            "if_two_matrix_ffn_tied_gpt2_vocab": transformer(**gpt2, num_matrices=2, head="tied").num_params,
        }
        check_printed(ours, printed)


@checks("P.leaderboard26")
def _(row: Row) -> None:
    given = row["inputs"]
    sizes = sizes_of(*(given[key] for key in ("vocab", "d_model", "d_ff", "layers", "heads")))
    assert transformer(**sizes).num_params == TransformerConfig(**sizes).num_params == row["our_value"]


@checks("S.optim_state")
def _(row: Row) -> None:
    sizes, each = XL.tensor_elements, row["inputs"]["state_bytes_per_param"]
    assert len(sizes) == row["inputs"]["tensors"]
    by_index = [each * sum(sizes[rank::2]) / MIB for rank in range(2)]  # tensor i belongs to rank i mod 2
    greedy = [0, 0]  # largest first, each to the rank that has least
    for size in sorted(sizes, reverse=True):
        greedy[greedy.index(min(greedy))] += size
    whole = each * XL.num_params / MIB
    ours = {
        "rank0_MiB": by_index[0],
        "rank1_MiB": by_index[1],
        "ratio_to_baseline": by_index[0] / whole,
        "imbalance": by_index[0] / by_index[1],
        "excess_over_half_MiB": by_index[0] - whole / 2,
        "baseline_MiB": whole,
        "best_LPT_MiB": each * max(greedy) / MIB,
    }
    check_printed(ours, row["our_value"])


@checks("S.zero1_diff")
def _(row: Row) -> None:
    theirs, ours = traffic("sharded_optimizer").total, traffic("zero1").total
    assert (theirs, ours, theirs / ours) == (3, 2, 1.5)
    assert "ours 3(N-1)/N * Psi, ZeRO-1 2(N-1)/N * Psi (1.5x)" in row["our_value"]


@checks("X.params")
def _(row: Row) -> None:
    given = row["inputs"]
    assert feed_forward(given["d_model"], given["d_ff"], given["blocks"]).num_params == row["our_value"]


@checks("X.states")
def _(row: Row) -> None:
    assert FP32.total == row["inputs"]["bytes_per_param"]
    ours = state_bytes(row["inputs"]["P"], stage=0).total
    check_printed(
        {
            "bytes": ours,
            "GiB": ours / GIB,
            "TB": ours / 1e12,
            "H100_at_80e9": ours / 80e9,
            "H100_at_80GiB": ours / (80 * GIB),
        },
        row["our_value"],
    )


@checks("H26.fsdp_accounting")
def _(row: Row) -> None:
    given = row["inputs"]
    xl = transformer(**sizes_of(10_000, 2560, 10_240, 32, 32))
    assert xl.num_params == given["params"]
    gains = [math.prod(shape) for name, shape in xl.tensors if name.endswith("norm")]  # not sharded
    cut = [math.prod(shape) for name, shape in xl.tensors if not name.endswith("norm")]
    ddp, sharded = (state_bytes(xl.num_params, stage, given["N"]).total / GIB for stage in (0, 1))
    fsdp = exact_state_bytes(cut, 3, given["N"], whole_elements=gains).total / GIB
    ours = {
        "ddp_GiB": ddp,
        "opt_sharded_GiB": sharded,
        "fsdp_GiB": fsdp,
        "saved_vs_opt_sharded_GiB": sharded - fsdp,
        "saved_vs_ddp_GiB": ddp - fsdp,
    }
    check_printed(ours, row["our_value"])


@checks("Z.mem")
def _(row: Row) -> None:
    states = dict(zip(row["our_value"], (FP32, MIXED, MIXED_ACCUMULATED), strict=True))
    for name, stages in row["our_value"].items():
        for stage, by_ranks in zip(STAGES, stages.values(), strict=True):
            for ranks, printed in by_ranks.items():
                ours = state_bytes(1, stage, int(ranks.removeprefix("N")), states[name]).total
                assert ours == printed, (name, stage, ranks)  # quotients of powers of two: exact


@checks("Z.paper")
def _(row: Row) -> None:
    ours = [state_bytes(row["inputs"]["Psi"], stage, row["inputs"]["N"], MIXED).total / 1e9 for stage in STAGES]
    check_printed(ours, row["our_value"])


@checks("Z.mixed_sum")
def _(row: Row) -> None:
    assert [MIXED_ACCUMULATED.total, MIXED.total] == row["our_value"]


@checks("Z.70B")
def _(row: Row) -> None:
    weights = PerParameter(row["inputs"]["bytes"], 0, 0)
    check_printed(state_bytes(row["inputs"]["params"], 0, 1, weights).total / GIB, row["our_value"])


@checks("Z.gbs")
def _(row: Row) -> None:
    micro, ranks = row["inputs"]["mbs"], row["inputs"]["dp"]
    batch = 2**22 // 2**12  # tokens over tokens per sequence
    steps = {count: batch // (micro * count) for count in (ranks, 4 * ranks)}
    ours = {
        "bs": micro * steps[ranks] * ranks,
        "tokens_binary": batch * 2**12,
        "ga128": steps[128],
        "ga512": steps[512],
        "bs_if_decimal_4e6_over_4096": 4e6 / 4096,
    }
    check_printed(ours, row["our_value"])


@checks("Z.gbs_over_dp")
def _(row: Row) -> None:
    gbs, dp, mbs = (row["inputs"][key] for key in ("gbs", "dp", "mbs"))
    check_printed({"gbs_over_dp": gbs / dp, "grad_acc": gbs / (mbs * dp)}, row["our_value"])


@checks("Z.63")
def _(row: Row) -> None:
    layers = row["inputs"]["layers"]
    gathers, printed = num_gathers(layers), row["our_value"]
    ours = {
        "allgathers": gathers,
        "reshards": gathers,
        "volume_in_layer_Psi": gathers / layers,
        "plus_reduce_scatter_total": gathers / layers + traffic("zero3").gradients,
        "without_trick": num_gathers(layers, keep_last=False),
        "with_A_microbatches": printed["with_A_microbatches"],
        "A4": [num_gathers(layers, 4, keep_first=True), num_gathers(layers, 4)],
    }
    check_printed(ours, printed)
    for a in (1, 3, 4):
        assert num_gathers(layers, a, keep_first=True) == 2 * a * (layers - 1) + 1
        assert num_gathers(layers, a) == a * (2 * layers - 1)


@checks("Z.comm")
def _(row: Row) -> None:
    a = np.arange(1, 9)
    words = {"2A": 2 * a, "A+1": a + 1, "2A+1": 2 * a + 1, "3A": 3 * a, "2": 2 + 0 * a, "3": 3 + 0 * a}
    names = {
        "stage0": "bucketed",
        "stage1": "zero1",
        "stage2": "zero2",
        "stage3": "zero3",
        "handout/blog sharded optimizer (AR + broadcast)": "sharded_optimizer",
        "stage1 with all-reduce (seed001's variant)": "sharded_optimizer",
        "stage3, parameters kept gathered over the step (no reshard)": "zero3",
    }
    kept_last = row["our_value"].pop("stage3, last layer kept")
    layers = 32
    assert kept_last == {"A=1": "3-1/L"}
    assert num_gathers(layers) / layers + traffic("zero3").gradients == 3 - 1 / layers
    for key, printed in row["our_value"].items():
        reshard = "no reshard" not in key
        for column, formula in printed.items():
            reduce = "once" if column.startswith("accumulate") else "every"
            batches = 1 if column == "A=1" else a
            ours = traffic(names[key], batches, reduce, reshard=reshard).total  # type: ignore[arg-type]
            expected = formula if column == "A=1" else words[formula.partition(" ")[0]]
            assert np.all(ours == np.asarray(expected)), (key, column)


@checks("Z.stage1_conflict")
def _(row: Row) -> None:
    assert (traffic("zero1").total, traffic("sharded_optimizer").total) == (2, 3)
    assert "RS + AG, 2 Psi" in row["our_value"] and "costs 3 Psi" in row["our_value"]


@checks("Z.examples")
def _(row: Row) -> None:
    counts = {
        "seed XL": XL.num_params,
        "handout25 xl": transformer(**sizes_of(10_000, 1600, 6400, 48, 25)).num_params,
        "handout25 2.7B": transformer(**sizes_of(10_000, 2560, 10240, 32, 32)).num_params,
        "XXL (9)": XXL.num_params,
    }
    for model, by_ranks in row["our_value"].items():
        for ranks, printed in by_ranks.items():
            num_ranks = int(ranks.removeprefix("N="))
            ours = {
                f"stage{stage}": state_bytes(counts[model], stage, num_ranks).total / GIB for stage in STAGES
            }  # fmt: skip
            check_printed(ours, printed)


@checks("S1.shapes")
def _(row: Row) -> None:
    count, ranks = row["inputs"]["params"], row["inputs"]["N"]
    # Elements: 6 + 6 + 12 for DDP, 6 + 3 + 6 for ZeRO-2.
    ours = {name: state_bytes(count, stage, ranks).total for name, stage in (("ddp", 0), ("zero2", 2))}
    check_printed({name: num_bytes / 4 for name, num_bytes in ours.items()}, row["our_value"]["per_rank_elements_fp32"])
    check_printed(ours, row["our_value"]["per_rank_bytes"])


@checks("N.adam2x")
def _(row: Row) -> None:
    assert FP32.optimizer == 2 * FP32.parameter and MIXED.optimizer == 6 * MIXED.parameter
    assert row["our_value"].startswith("8 B against 4 B in fp32; 6x the bf16 weights")


@checks("S.time")
def _(row: Row) -> None:
    before, after = (each["step_mean_ms"] for each in row["inputs"]["table"])
    size_bytes, printed = 4 * XL.num_params, row["our_value"]
    at_bus_ms = size_bytes / 4.0056e9 * 1e3
    # Sharding halves the optimizer's pass over its state, 89.53 ms of a step in B.fit_simulated.
    half_ms = 89.53 / 2
    ours = {
        "delta_ms": after - before,
        "pct": 100 * (after / before - 1),
        "bcast_ms_at_allreduce_busbw": at_bus_ms,
        "adam_half_ms_est": half_ms,
        "implied_bcast_ms": after - before + half_ms,
        "implied_bcast_GBps": size_bytes / (after - before + half_ms) / 1e6,
        "implied_bcast_GBps_upper": size_bytes / (after - before) / 1e6,
    }
    assert math.isclose(ours["adam_half_ms_est"], printed["adam_half_ms_est"], rel_tol=2e-3)  # printed with 3 digits
    check_printed({**ours, "adam_half_ms_est": printed["adam_half_ms_est"]}, printed, 3)
