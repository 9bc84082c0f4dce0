"""Bucket sizes: measured step times beside predicted and simulated ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import MIB, Row, by, counted, is_sound, listed, number, plain, short, spread, text
from ..report.axis import linear, logarithmic
from ..report.figure import Figure
from ..report.lines import Curve, Point, curve_figure, values_of
from ..report.published import buckets_beside
from ..report.section import Section
from ..report.sentences import extremes, few_rounds, is_apart, left_out, of_group, time_of, timed
from ..report.steps import (
    STEP_COLUMNS,
    between_frameworks,
    device_notes,
    group,
    how_ranks_run,
    name,
    step_table,
    without_comparison,
)

_COMPUTED = (("predicted_ms", "predicted"), ("simulated_ms", "simulated"))
_MICROSECONDS = "\N{GREEK SMALL LETTER MU}s"
_LEFT_OUT = ("planned", "loss", "max diff")  # on the console


def _with_deviation(name: str, key: str, unit: str = "ms", *, is_wide: bool = False) -> Column:
    """A column of a computed time and its standard deviation."""

    def of(row: Row) -> tuple[float, ...] | None:
        value, deviation = number(row, f"{key}_ms"), number(row, f"{key}_sd_ms")
        return None if value is None else (value,) if deviation is None else (value, deviation)

    return Column(name, of, unit, lambda both: " +- ".join(map(short, both)), is_wide)


_COLUMNS = (
    *(replace(column, is_wide=column.is_wide or column.name in _LEFT_OUT) for column in STEP_COLUMNS[:-1]),
    _with_deviation("predicted", "predicted"),
    numeric("error", "error_share", form=lambda share: f"{share:+.0%}"),
    _with_deviation("simulated", "simulated"),
    _with_deviation("predicted", "predicted_exposed", "ms exposed"),
    _with_deviation("simulated", "simulated_exposed", "ms exposed", is_wide=True),
    Column("best", lambda row: text(row, "best")),
    field("regime", is_wide=True),
    CHECK,
)
_OPTIMUM_COLUMNS = (
    Column("of", lambda row: group(row) or text(row, "part")),
    numeric("predicted best", "optimum_mb", unit="MiB", form=plain),
    numeric("measured best", "measured_optimum_mb", unit="MiB", form=plain),
    Column("as good", lambda row: as_good(row)),
    numeric("by formula", "uniform_optimum_mb", unit="MiB"),
    field("regime"),
    numeric("backward", "backward_ms", unit="ms"),
    numeric("latency", "alpha_us", unit=_MICROSECONDS),
    numeric("standard error", "alpha_error_us", unit=_MICROSECONDS),
    numeric("algbw", "gb_per_s", unit="GB/s"),
    numeric("standard error", "gb_per_s_error", unit="GB/s"),
    CHECK,
)
_DEVIATIONS = 1.2816  # from the median of a normal distribution to its 90th percentile
_CAPS_MB = [factor * 10.0**decade for decade in range(-3, 5) for factor in (1, 2, 5)]


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    optima = [row for row in rows if number(row, "optimum_mb") is not None]
    steps = [row for row in rows if number(row, "optimum_mb") is None and "ready_shares" not in row]
    steps = [row | {"best": _marks(row, optima)} for row in without_comparison(steps)]  # type: ignore[operator]
    table = step_table("Steps by bucket size", steps, _COLUMNS)
    note = "by formula: equal buckets, where latency and the backward are all that counts"
    parts = [
        *(_figure(each, some, optima) for each, some in by(steps, group).items()),
        replace(table, note=f"{table.note}; +-: standard deviation, from resampled rounds"),
        Table("The best caps", _OPTIMUM_COLUMNS, optima, note),
    ]
    sentences = [sentence for each, some in by(steps, group).items() for sentence in _sentences(each, some, optima)]
    return Section(
        "Bucket sizes",
        [*sentences, *between_frameworks(rows), few_rounds(steps), left_out(rows)],
        parts,
        buckets_beside(steps, optima),
        _notes(steps),
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [
        "predicted: the step without communication, plus what an in-order pipeline of the real buckets leaves exposed."
        " A gradient is ready by its share of the FLOPs of forward and backward, and sent in the time fitted to"
        " all-reduces of the same rounds; while both are under way each runs at the rate measured for that (50 % is as"
        " slow as one after the other)",
        "check: ok if the result is right and the prediction within 15 % of the measured step",
    ]
    for row in [row for row in rows if "is_async" in row][:1]:
        how = "asynchronous" if row["is_async"] else "synchronous (as XLA's are on CPUs), so all of them is exposed"
        notes.append(
            "simulated: the compiled schedule of jaxddp, on the fitted network and a device as fast as measured; its"
            f" collectives are {how}; torchref compiles none"
        )
    return [how_ranks_run(timed(rows)), *notes, *device_notes(timed(rows))]


def _marks(row: Row, optima: Sequence[Row]) -> str:
    """Whether a row's cap is the best one as measured, as predicted, or both."""
    names = {"measured_optimum_mb": "measured", "optimum_mb": "predicted"}
    found = [
        word
        for one in optima
        for key, word in names.items()
        if one.get("framework") == row.get("framework") and one.get(key) == row.get("bucket_mb")
    ]
    return "both" if len(found) == len(names) else "".join(found)


def cap_mb(row: Row) -> float | None:
    """The cap of a row's buckets in MiB; without one, the size of all parameters."""
    params = number(row, "params_bytes")
    whole = params / MIB if params and row.get("bucket_mb", 0) is None else None
    return number(row, "bucket_mb") or whole


def as_good(row: Row) -> str:
    """The caps in MiB that are as good as the best one, within the noise."""
    caps = row.get("as_good_mb")
    return ", ".join(f"{cap:g}" for cap in caps if isinstance(cap, int | float)) if isinstance(caps, list) else ""


def _figure(each: str, rows: Sequence[Row], optima: Sequence[Row]) -> Figure | None:
    placed = [row for row in timed(rows) if cap_mb(row)]
    if not placed:
        return None
    curves = [Curve("measured", 0, [Point(cap_mb(row) or 0, row["median_ms"], spread(row)) for row in placed])]
    for style, (key, words) in enumerate(_COMPUTED, 1):
        points = [Point(cap_mb(row) or 0, value) for row in placed if (value := number(row, key)) is not None]
        if points:
            curves.append(Curve(words, style, points, is_dashed=True))
    times = values_of(curves)
    best = [value for row in _optima_of(placed, optima) if (value := number(row, "optimum_mb"))]
    x_axis = logarithmic([*(point.x for point in curves[0].points), *best], plain, _CAPS_MB)
    marked = f" The vertical line: the predicted best cap, {plain(best[0])} MiB." if best else ""
    said, y_axis = of_group(each, extremes(placed, name, "step")) + marked, linear(times, start=0.8 * min(times))
    x_means = "cap of a bucket, MiB"
    return curve_figure(f"Step by bucket size: {each}", said, curves, x_axis, y_axis, x_means, "ms", best)


def _sentences(each: str, rows: Sequence[Row], optima: Sequence[Row]) -> list[str]:
    said = [extremes(rows, name, "step")]
    placed = [row for row in timed(rows) if cap_mb(row)]
    predicted = [row for row in placed if (number(row, "predicted_ms") or 0) > 0]
    if predicted:
        said.append(_judged(predicted))
    for row in _optima_of(placed, optima) if placed else []:
        found = f"The best cap is predicted as {plain(row['optimum_mb'])} MiB"
        measured, regime = number(row, "measured_optimum_mb"), text(row, "regime")
        if measured is not None:
            others = [cap for cap in as_good(row).split(", ") if cap and cap != f"{measured:g}"]
            alike = f", with {listed(others)} MiB as good" if others else ""
            found += f" and measured as {plain(measured)} MiB{alike}"
        said.append(found + (f"; the step is {regime}." if regime else "."))
    return [of_group(each, " ".join(filter(None, said)))]


def _judged(rows: Sequence[Row]) -> str:
    """A sentence on how many predictions differ from the measurement by more than the spread, and the worst one."""
    apart = [row for row in rows if is_apart(row, _prediction(row))]
    if not apart:
        return f"The spreads tell none of {counted(len(rows), 'prediction')} from what was measured."
    furthest = max(apart, key=lambda row: abs(math.log(row["predicted_ms"] / row["median_ms"])))
    deviation = number(furthest, "predicted_sd_ms")
    noise = "" if deviation is None else f" (standard deviation {short(deviation)} ms)"
    differ, most = ("differ", ", most of all") if len(apart) > 1 else ("differs", ",")
    return (
        f"{len(apart)} of {counted(len(rows), 'prediction')} {differ} from what was measured by more than the"
        f" spreads{most} that of {name(furthest)}: {short(furthest['predicted_ms'])} ms{noise} predicted,"
        f" {time_of(furthest)} measured."
    )


def _prediction(row: Row) -> Row:
    """A row's prediction as a time, with the percentiles of a normal distribution."""
    predicted, away = row["predicted_ms"], _DEVIATIONS * (number(row, "predicted_sd_ms") or 0.0)
    return {"median_ms": predicted, "p10_ms": predicted - away, "p90_ms": predicted + away}


def _optima_of(rows: Sequence[Row], optima: Sequence[Row]) -> list[Row]:
    """The optima with the framework and number of ranks of some rows."""
    keys = ("framework", "num_ranks", "backend")
    return [
        one for one in optima
        if is_sound(one) and all(one.get(key) in (None, row.get(key)) for row in rows for key in keys)
    ]  # fmt: skip
