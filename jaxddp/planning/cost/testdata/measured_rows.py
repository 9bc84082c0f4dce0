"""Rows on the documents' own measurements, and the differences between them."""

from __future__ import annotations

import numpy as np

from ..memory import state_bytes
from ..workload import transformer
from . import Row, check_printed, checks, load_rows

MIB = 2**20
XL = transformer(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200)


@checks("T1.claims")
def _(row: Row) -> None:
    """The statement contains the ratios of T1.allreduce."""
    for ratios in load_rows()["T1.allreduce"]["our_value"]["nccl_over_gloo_speedup"].values():
        assert ", ".join(f"{ratio:.2f}" for ratio in ratios) in row["our_value"]


@checks("T2.strategies")
def _(row: Row) -> None:
    by_name = {each["variant"]: each for each in row["document_value"]}
    synchronous = [each for name, each in by_name.items() if name != "overlap"]
    compute_ms = float(np.mean([each["step_mean_ms"] - each["comm_mean_ms"] for each in synchronous]))
    naive_ms = by_name["per_param"]["step_mean_ms"]
    for name, printed in row["our_value"].items():
        step_ms, communication_ms = by_name[name]["step_mean_ms"], by_name[name]["comm_mean_ms"]
        exposed_ms = step_ms - compute_ms
        ours = {
            "step_ms": step_ms,
            "saved_ms": naive_ms - step_ms,
            "saved_pct": 100 * (1 - step_ms / naive_ms),
            "speedup": naive_ms / step_ms,
            "reported_comm_pct": 100 * communication_ms / step_ms,
            "true_exposed_ms": exposed_ms,
            "true_exposed_pct": 100 * exposed_ms / step_ms,
        }
        check_printed(ours, printed, 3)


@checks("T2.exposed")
def _(row: Row) -> None:
    given = row["inputs"]
    exposed_ms = given["overlap_step_ms"] - given["compute_only_ms"]
    hidden_ms = given["comm_sync_ms"] - exposed_ms
    ours = {
        "exposed_ms": exposed_ms,
        "exposed_pct": 100 * exposed_ms / given["overlap_step_ms"],
        "hidden_ms": hidden_ms,
        "hidden_fraction": hidden_ms / given["comm_sync_ms"],
    }
    check_printed(ours, row["our_value"], 3)


@checks("T2.comm_fraction")
def _(row: Row) -> None:
    # A synchronous run exposes all of its communication.
    check_printed(100 * row["inputs"]["comm"] / row["inputs"]["step"], row["our_value"])


@checks("T3.buckets")
def _(row: Row) -> None:
    steps = {each["variant"]: each for each in row["document_value"]}
    base_ms, one_bucket_ms = (steps[name]["step_mean_ms"] for name in ("overlap", "bucketed_1000mb"))
    for name, printed in row["our_value"].items():
        step_ms = steps[name]["step_mean_ms"]
        ours = {
            "step_ms": step_ms,
            "vs_overlap_ms": step_ms - base_ms,
            "vs_overlap_pct": 100 * (step_ms / base_ms - 1),
            "se_ms": steps[name]["step_std_ms"] / row["inputs"]["steps"] ** 0.5,
            "saved_vs_1000mb_ms": one_bucket_ms - step_ms,
        }
        check_printed(ours, printed, 3)


@checks("S.peaks")
def _(row: Row) -> None:
    baseline, sharded = row["inputs"]["table"]
    moments = ("after_init", "before_step", "after_step")
    excess = {moment: sharded[f"peak_{moment}_mb"] - baseline[f"peak_{moment}_mb"] for moment in moments}
    saved = baseline["optim_state_mb"] - sharded["optim_state_mb"]
    excess["after_step_plus_saving"] = excess["after_step"] + saved
    state = state_bytes(XL.num_params, stage=0)
    copies = (state.parameters + state.gradients) / MIB
    corrected = sharded["peak_after_step_mb"] - copies
    ours = {
        "sharded_minus_baseline_MiB": excess,
        "two_model_copies_MiB": copies,
        "leftover_after_1305_MiB": {
            "after_init": excess["after_init"] - copies,
            "before_step": excess["before_step"] - copies,
            "after_step": excess["after_step_plus_saving"] - copies,
        },
        "corrected_sharded_peak_after_step_MiB": corrected,
        "corrected_vs_baseline_pct": 100 * (corrected / baseline["peak_after_step_mb"] - 1),
    }
    check_printed(ours, row["our_value"])


@checks("S.baseline_after_step")
def _(row: Row) -> None:
    state_mib = state_bytes(XL.num_params, stage=0).total / MIB
    residual = row["inputs"]["peak_MiB"] - state_mib
    logits, largest = 4 * 16 * 128 * 10_000 / MIB, 4 * max(XL.tensor_elements) / MIB
    workspace, buffers = 8.125, 2015.8 / 1024  # the matrix library's, and S.init_residual
    ours = {
        "states_MiB": state_mib,
        "residual_MiB": residual,
        "logits_MiB": logits,
        "largest_tensor_MiB": largest,
        "unexplained_after_logits_2tmp_ws_buffers": residual - logits - 2 * largest - workspace - buffers,
    }
    check_printed(ours, row["our_value"], 2)


@checks("S.init_residual")
def _(row: Row) -> None:
    parameters = state_bytes(XL.num_params, stage=0).parameters / MIB
    check_printed(parameters, row["inputs"]["param_MiB"])
    check_printed({"residual_KiB": (row["inputs"]["peak_MiB"] - parameters) * 1024}, row["our_value"])
