import io
import re

import pytest

from jaxddp.cli.train_console import NUM_PLAIN_LINES, TrainConsole
from jaxddp.cli.train_options import TrainOptions
from jaxddp.cli.train_report import StepReport, TrainSummary
from jaxddp.instruments.schedule import describe_collectives
from jaxddp.training.clock import Timings


class Output(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    # As a CI job may: none of these may put control codes into a file.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")


def make_summary(**changes):
    collectives = [("all-reduce", 2**20), ("all-reduce", 3 * 2**20)]
    values = {
        "options": TrainOptions(steps=60, devices=2, bucket_mb=2.5),
        "num_params": 1_048_576,
        "params_bytes": 2**22,
        "source": "text [of] mine",
        "num_bytes": 1_234_567,
        "devices": "2 simulated CPU devices on 2 cores",
        "context": 128,
        "planned": collectives,
        "compiled": sorted(collectives, reverse=True),
        "compile_s": 4.25,
        "first_loss": 5.5,
        "last_loss": 2.5,
        "validation_loss": 2.0,
        "num_validation_bytes": 16_384,
        "step_timings": Timings(1000.0, 900.0, 1250.0),
    }
    return TrainSummary(**{**values, **changes})


def shown(is_terminal, num_steps=60, reports=(), summary=None):
    output = Output(is_terminal)
    console = TrainConsole(num_steps, output)
    with console:
        for report in reports:
            console.on_step(report)
    if summary:
        console.show(summary)
    return output.getvalue()


def test_summary_in_a_file_is_plain_lines_with_units():
    assert shown(False, summary=make_summary()).splitlines() == [
        "model        byte: 1,048,576 parameters, 4.0 MiB",
        "optimizer    adamw, learning rate 0.001",
        "text         text [of] mine, 1,234,567 bytes",
        "ranks        2 simulated CPU devices on 2 cores",
        "strategy     bucketed, buckets of at most 2.5 MiB",
        "collectives  planned 2 all-reduces, 4.0 MiB per step; compiled: the same",
        "loss         5.500 nats at step 1, 2.500 at step 60",
        "validation   2.000 nats, 2.885 bits per byte, over 16,384 held-out bytes",
        "step time    median 1,000 ms (p10 900, p90 1,250); compiled in 4.2 s",
        "throughput   4,096 tokens/s (32 x 128 per step)",
    ]


def test_summary_says_what_is_not_as_planned_and_what_is_missing():
    text = shown(False, summary=make_summary(compiled=[("all-reduce", 2**22)], validation_loss=None))
    assert "2 all-reduces, 4.0 MiB per step; compiled: 1 all-reduce, 4.0 MiB per step, NOT AS PLANNED\n" in text
    assert "validation   none: fewer than batch_size (=32) windows are held out\n" in text


def test_summary_in_a_terminal_is_the_same_lines():
    lines = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown(True, summary=make_summary())).splitlines()
    assert [line.strip() for line in lines][-10:] == shown(False, summary=make_summary()).splitlines()


def test_steps_in_a_file_are_a_line_now_and_then_and_one_for_each_validation():
    reports = [StepReport(step, 6 - step / 100, 2.0 if step == 13 else None, 1234.5) for step in range(1, 101)]
    lines = shown(False, num_steps=100, reports=reports).splitlines()
    assert len(lines) == NUM_PLAIN_LINES + 2
    assert lines[0] == "step   1/100  loss 5.990  1,234 tokens/s"
    assert lines[1] == "step   5/100  loss 5.950  1,234 tokens/s"
    assert lines[3] == "step  13/100  loss 5.870  1,234 tokens/s  validation 2.000 nats, 2.885 bits per byte"
    assert lines[-1] == "step 100/100  loss 5.000  1,234 tokens/s"


def test_steps_in_a_terminal_move_a_bar_and_leave_the_validations():
    reports = [StepReport(1, 5.5, None, 100.0), StepReport(2, 5.25, 4.0, 100.0)]
    text = shown(True, num_steps=2, reports=reports)
    assert "compiling" in text and "━" in text
    assert "step 2/2  loss 5.250  100 tokens/s  validation 4.000 nats, 5.771 bits per byte\n" in text
    assert "loss 5.500  100 tokens/s\n" not in text
    # The bar is erased and the cursor comes back.
    assert text.endswith("\x1b[2K") and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_log_beside_a_terminal_has_the_lines_of_a_file():
    log = io.StringIO()
    with TrainConsole(2, Output(True), log) as console:
        console.on_step(StepReport(1, 5.5, None, 100.0))
        console.on_step(StepReport(2, 5.25, 4.0, 100.0))
    validation = "  validation 4.000 nats, 5.771 bits per byte"
    lines = ["step 1/2  loss 5.500  100 tokens/s", f"step 2/2  loss 5.250  100 tokens/s{validation}"]
    assert log.getvalue().splitlines() == lines


def test_a_dumb_terminal_is_treated_as_a_file(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = shown(True, num_steps=1, reports=[StepReport(1, 5.5, None, 100.0)], summary=make_summary())
    assert text.startswith("step 1/1  loss 5.500  100 tokens/s\nmodel        byte")
    assert "\x1b" not in text


def test_no_control_codes_in_a_file():
    reports = [StepReport(step, 5.0, 5.0, 10.0) for step in range(1, 61)]
    text = shown(False, reports=reports, summary=make_summary(compiled=[]))
    assert text.isascii() and "\x1b" not in text and "\r" not in text


def test_collectives_in_words():
    assert describe_collectives([]) == "none"
    both = [("reduce-scatter", 2**20), ("all-gather", 2**20), ("all-gather", 2**19)]
    assert describe_collectives(both) == "1 reduce-scatter, 2 all-gathers, 2.5 MiB per step"


def test_the_step_that_was_reached_is_kept():
    console = TrainConsole(5, Output(False))
    assert console.num_steps_taken == 0
    console.on_step(StepReport(3, 5.0, None, 10.0))
    assert console.num_steps_taken == 3


def test_a_resumed_run_names_its_own_first_step():
    assert "loss         5.500 nats at step 31, 2.500 at step 60\n" in shown(False, summary=make_summary(first_step=31))
