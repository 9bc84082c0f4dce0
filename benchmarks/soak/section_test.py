"""The section on reliability."""

from benchmarks.report.conftest import fault, row, whole_soak
from benchmarks.report.figure import Figure
from benchmarks.report.sections import is_known
from benchmarks.soak.faults import KILL, STOP
from benchmarks.soak.section import section


def table(made, caption):
    return next(part for part in made.parts if getattr(part, "caption", "") == caption)


def cells(made, caption, index):
    shown = table(made, caption)
    return {column.name: column.cell(shown.rows[index]) for column in shown.columns}


def test_faults_by_kind():
    stuck = fault(STOP, "torchrun alone", 90.0, noticed_s=None, check="not noticed in 60 s, then killed by hand")
    made = section([fault(KILL), fault(KILL, back_s=20.0), stuck, whole_soak()])
    assert cells(made, "Faults by kind", 0) == {
        "fault": KILL, "side": "jaxddp", "tried": "2", "noticed": "2", "time to detect": "0.5 – 0.5",
        "all ended": "2.0 – 2.0", "time to recover": "15.0 – 20.0", "steps lost": "4.0", "left behind": "nothing",
        "check": "ok",
    }  # fmt: skip
    alone = cells(made, "Faults by kind", 1)
    assert (alone["tried"], alone["noticed"], alone["time to detect"]) == ("1", "0", "–")
    assert alone["check"] == "not noticed in 60 s, then killed by hand (1 of 1)"


def test_what_is_wrong_with_one_is_wrong_with_its_kind():
    bad = fault(KILL, left_behind="2 processes", check="WRONG: left behind 2 processes")
    made = section([fault(KILL), bad])
    kind = cells(made, "Faults by kind", 0)
    assert (kind["left behind"], kind["check"]) == ("2 processes (1 of 2)", "WRONG: left behind 2 processes (1 of 2)")


def test_goodput_is_one_picture_and_one_sentence():
    made = section([whole_soak(), whole_soak("torchrun alone", goodput=0.25, max_weight_difference=None)])
    (figure,) = [part for part in made.parts if isinstance(part, Figure)]
    assert "jaxddp: useful steps 60.0 %" in figure.description and "restart 15.0 %" in figure.description
    assert [key.name for key in figure.legend] == [
        "useful steps", "repeated steps", "saving", "compilation", "detection", "start and restart",
    ]  # fmt: skip
    assert made.sentences[0].endswith("the weights equal those of an undisturbed run, bit for bit. The disk that filled"
                                      " up was a tmpfs.")  # fmt: skip
    assert "bit for bit" not in made.sentences[1]


def test_it_is_a_section_of_the_page():
    assert is_known("soak")
    assert section([row("soak") | {"check": "FAILED: training did not start"}]).sentences
