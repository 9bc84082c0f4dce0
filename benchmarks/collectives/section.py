"""Collectives by size: the time of a call, and the bandwidth that it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import Row, buffer_bytes, by, is_sound, number, percent, short, size, span, spread, text
from ..report.axis import logarithmic
from ..report.figure import NUM_STYLES, Figure
from ..report.lines import Curve, Point, curve_figure, values_of
from ..report.published import collectives_beside
from ..report.section import Section
from ..report.sentences import extremes, left_out, time_of, timed
from ..report.steps import collectives, group, ranks
from .cases import NAMES
from .ratio import PAIRS, ratios, report_ratios


def _interval(row: Row, low: str, high: str) -> tuple[float, float | None] | None:
    """An interval of a fit; an upper end that the row has as None is unbounded."""
    ends = number(row, low), number(row, high)
    is_unbounded = high in row and row[high] is None
    return None if ends[0] is None or (ends[1] is None and not is_unbounded) else (ends[0], ends[1])


def _ends(interval: tuple[float, float | None]) -> str:
    low, high = interval
    return f"at least {short(low)}" if high is None else span((low, high))


def _size(row: Row) -> float:
    return buffer_bytes(row) or 0.0


SHOWN_SIZES = 4
_BACKENDS = ("XLA over NCCL", "NCCL", "NCCL, nccl-tests", "XLA over Gloo", "XLA in-process", "Gloo")
_MICROSECONDS = "\N{GREEK SMALL LETTER MU}s"
_SIZES = [4.0**power for power in range(21)]
_COLUMNS = (
    Column("collective", lambda row: collective(row) or text(row, "part")),
    field("framework"),
    field("backend"),
    Column("ranks", ranks),
    Column("size", buffer_bytes, form=size),
    numeric("call", "median_ms", unit="ms"),
    Column("p10\N{EN DASH}p90", spread, "ms", span),
    numeric("rounds", "num_rounds", form=lambda value: f"{value:.0f}"),
    numeric("in a row", "in_a_row_us", unit=_MICROSECONDS),
    numeric("algbw", "algbw_gb_per_s", unit="GB/s"),
    numeric("busbw", "busbw_gb_per_s", unit="GB/s"),
    collectives("planned"),
    collectives("found", "compiled"),
    field("kernel"),
    CHECK,
)
_FIT_COLUMNS = (
    *_COLUMNS[:4],
    numeric("sizes", "num_sizes", form=lambda value: f"{value:.0f}"),
    numeric("latency", "alpha_us", unit=_MICROSECONDS),
    Column("95 % interval", partial(_interval, low="alpha_low_us", high="alpha_high_us"), _MICROSECONDS, _ends),
    numeric("rate", "gb_per_s", unit="GB/s"),
    Column("95 % interval", partial(_interval, low="gb_per_s_low", high="gb_per_s_high"), "GB/s", _ends),
    numeric("a rank sends", "bus_gb_per_s", unit="GB/s"),
    numeric("worst error", "worst_error", unit="of a call", form=percent),
    CHECK,
)


def collective(row: Row) -> str:
    """A row's collective, as HLO spells it."""
    return text(row, "collective").replace("_", "-")


def is_fit(row: Row) -> bool:
    """Whether a row is a fit over sizes."""
    return "alpha_us" in row


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    calls = [row for row in rows if not is_fit(row)]
    fits = [row for row in rows if is_fit(row)]
    placed = [row for row in calls if is_sound(row) and number(row, "median_ms") and _size(row)]
    styles = {each: style for style, each in enumerate(by(placed, group))}
    figures = [
        _figure(f"{name}: {what}", some, styles, key, unit)
        for name, some in by(placed, collective).items()
        for what, key, unit in (("time of a call", "median_ms", "ms"), ("bus bandwidth", "busbw_gb_per_s", "GB/s"))
    ]
    compared = _ratio_rows(placed)
    calls, fits = sorted(calls, key=_order), sorted(fits, key=_order)
    shown = _shown_sizes(calls)
    parts = [
        *figures,
        _ratio_figure(compared),
        Table("Calls by collective and size", _COLUMNS, calls, group=collective,
              is_brief=lambda row: _size(row) in shown),
        Table("What the sizes of one collective have in common", _FIT_COLUMNS, fits, _FIT_NOTE),
        Table("Bandwidth of one backend over another's, all-reduce", _RATIO_COLUMNS, compared, _RATIO_NOTE),
    ]  # fmt: skip
    sentences = [*_sentences(calls), *map(_in_words, _largest(compared)), left_out(rows)]
    notes = [*_NOTES, _KERNEL_NOTE if any(text(row, "kernel") for row in rows) else ""]
    notes += [_IN_A_ROW_NOTE if any(number(row, "in_a_row_us") for row in rows) else ""]
    return Section("Collectives by size", sentences, parts, collectives_beside(rows), notes)


_NOTES = (
    "time: of a round the slowest rank's; median and p10-p90 over rounds. The collectives of a size take turns, with a"
    " barrier before each call; backends run one after the other, in processes of their own",
    "algbw: bytes of the full buffer over the time of a call; busbw: algbw times the share of the buffer that a rank"
    " has to send: 2 (N-1)/N of an all-reduce, (N-1)/N of a reduce-scatter or all-gather, else 1; it compares with the"
    " speed of the links, whatever the number of ranks",
    "planned and found: AR all-reduce, RS reduce-scatter, AG all-gather, ATA all-to-all, CP collective-permute, SR"
    " send-recv, B broadcast, R reduce; XLA's are read back from the compiled program, torch's are those issued. Over"
    " Gloo, an all-to-all replaces XLA's reduce-scatter; between two ranks, an all-reduce of half the bytes replaces"
    " both the reduce-scatter and the all-gather. jaxddp's broadcast and reduce are all-reduces, because XLA lacks them"
    " on some backends",
    "XLA writes into new buffers; torch's all_reduce and broadcast work in place; on CPUs both keep freed memory",
    "simulated devices (XLA in-process) copy within one memory and send nothing",
)
_IN_A_ROW_NOTE = (
    "in a row: a call of 20, or as many as --in-a-row says, between two synchronisations, on buffers of up to 1 MiB;"
    " the time of nccl-tests is of 20, out of place, and its bandwidths are of that time"
)
_FIT_NOTE = (
    "of a call: time = latency + bytes of the buffer / rate; rate: the algbw of a large buffer; a rank sends:"
    " its busbw, the rate times the collective's bus factor, with the rate's interval times the same"
)
_RATIO_NOTE = "the two did not run at the same time: the intervals are of rounds resampled on either side"
_KERNEL_NOTE = "kernel: how XLA runs a collective on GPUs; DEFAULT is NCCL's, the others are XLA's own"
_RATIO_COLUMNS = (
    field("backends", "pair"),
    numeric("ranks", "num_ranks", form=lambda value: f"{value:.0f}"),
    numeric("size", "size_bytes", form=size),
    numeric("ratio", "ratio", form=lambda value: f"{value:.2f}"),
    Column("interval", lambda row: (row["low"], row["high"]), "95 %", span),
)


def _ratio_rows(rows: Sequence[Row]) -> list[Row]:
    """Bandwidth ratios of every pair of backends, by number of ranks and size; the report's NCCL over Gloo last."""
    found: list[Row] = []
    for num_ranks in sorted({row["num_ranks"] for row in rows if number(row, "num_ranks")}):
        by_pair = {" / ".join(pair): ratios(rows, pair, num_ranks) for pair in PAIRS}
        if any(by_pair.values()):
            by_pair["NCCL / Gloo in the assignment report"] = report_ratios(("NCCL", "Gloo"), num_ranks)
        for pair, of_pair in by_pair.items():
            found += [{"pair": pair, "num_ranks": num_ranks, **row} for row in of_pair]
    return found


def _ratio_figure(compared: Sequence[Row]) -> Figure | None:
    if not compared:
        return None
    named = by(compared, lambda row: f"{row['pair']}, {row['num_ranks']} ranks")
    curves = []
    for style, (name, some) in enumerate(named.items()):
        points = [Point(row["size_bytes"], row["ratio"], (row["low"], row["high"])) for row in some]
        curves.append(Curve(name, style % NUM_STYLES, points, is_dashed="report" in name))
    said = "Above 1 the first backend is faster; whiskers: 95 % interval, of the report one standard deviation."
    x_axis, y_axis = logarithmic(map(_size, compared), size, _SIZES), logarithmic(values_of(curves))
    title = "all-reduce: bandwidth over bandwidth"
    return curve_figure(title, said, curves, x_axis, y_axis, "size of the buffer", "ratio")


def _largest(compared: Sequence[Row]) -> list[Row]:
    """The ratio of each pair measured here, at its largest size."""
    measured = [row for row in compared if "report" not in row["pair"]]
    return [some[-1] for some in by(measured, lambda row: (row["pair"], row["num_ranks"])).values()]


def _in_words(row: Row) -> str:
    ours, theirs = row["pair"].split(" / ")
    return (
        f"all-reduce of {size(row['size_bytes'])}, {row['num_ranks']} ranks: {ours} has {row['ratio']:.2f} times the"
        f" bandwidth of {theirs} (95 % interval {row['low']:.2f} to {row['high']:.2f})."
    )


def _shown_sizes(rows: Sequence[Row]) -> set[float]:
    """The sizes shown on the console: all if there are few, else the smallest, one in the middle and the largest."""
    sizes = sorted({_size(row) for row in rows if _size(row)})
    few = sizes if len(sizes) <= SHOWN_SIZES else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    return {0.0, *few}


def _order(row: Row) -> tuple[int, float, float, int]:
    """Sorts rows so that comparable ones are side by side."""
    name, backend = text(row, "collective"), text(row, "backend")
    return (
        NAMES.index(name) if name in NAMES else len(NAMES),
        number(row, "num_ranks") or 0,
        _size(row),
        _BACKENDS.index(backend) if backend in _BACKENDS else len(_BACKENDS),
    )


def _figure(title: str, rows: Sequence[Row], styles: dict[str, int], key: str, unit: str) -> Figure | None:
    curves, said = [], []
    for name, some in by(rows, group).items():
        points = [
            Point(_size(row), value, spread(row) if key == "median_ms" else None)
            for row in some
            if (value := number(row, key))
        ]
        if points:
            # Curves beyond the number of styles are dashed.
            curves.append(Curve(name, styles[name], points, is_dashed=styles[name] >= NUM_STYLES))
            first, last = curves[-1].ends
            said.append(f"{name}: {short(first.y)} {unit} at {size(first.x)}, {short(last.y)} at {size(last.x)}.")
    if not curves:
        return None
    x_axis, y_axis = logarithmic(map(_size, rows), size, _SIZES), logarithmic(values_of(curves))
    said_of_all = f"Both axes logarithmic. {' '.join(said)}"
    return curve_figure(title, said_of_all, curves, x_axis, y_axis, "size of the buffer", unit)


def _sentences(rows: Sequence[Row]) -> list[str]:
    """Sentences at each framework's most ranks: its smallest and its largest call, and which framework is faster."""
    shown = by(timed(rows), collective)
    name = "all-reduce" if "all-reduce" in shown else next(iter(shown), "")
    most: dict[str, list[Row]] = {}
    for some in by(shown.get(name, []), lambda row: text(row, "framework") + text(row, "backend")).values():
        ranks_ = max(number(row, "num_ranks") or 0 for row in some)
        most |= by([row for row in some if (number(row, "num_ranks") or 0) == ranks_], group)
    said = []
    for each, some in most.items():
        ordered = sorted((row for row in some if _size(row)), key=_size)
        if len(ordered) > 1:
            reached = number(ordered[-1], "busbw_gb_per_s")
            said.append(
                f"{each}: the {name} of {size(_size(ordered[0]))} takes {time_of(ordered[0])}, that of"
                f" {size(_size(ordered[-1]))} {time_of(ordered[-1])}"
                + (f", a bus bandwidth of {short(reached)} GB/s." if reached else ".")
            )
    sizes = [{_size(row) for row in some if _size(row)} for some in most.values()]
    shared = set.intersection(*sizes) if len(sizes) > 1 else set()
    if shared:
        at_end = [row for some in most.values() for row in some if _size(row) == max(shared)]
        said.append(f"At {size(max(shared))} {extremes(at_end, group, name)}")
    return said
