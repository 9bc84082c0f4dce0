"""Tables say what they mean to eyes, to ears and to the script that sorts them."""

import re

from benchmarks.harness.tables import CHECK, Column, Table, field, numeric
from benchmarks.report.table import render

ROWS = [
    {"name": "b", "ms": 1234.5, "check": "ok"},
    {"name": "a", "ms": None, "check": "WRONG: weights differ"},
    {"name": "c", "ms": 0.5, "check": "not run: no GPU"},
]
COLUMNS = (
    field("name"),
    numeric("step", "ms", unit="ms"),
    Column("spread", lambda row: (row["ms"], 2.0) if row["ms"] else None, form=str),
    field("nothing"),
    CHECK,
)


def cells(markup):
    return [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[dh][ >].*?</t[dh]>", markup)]


def test_cells_headings_and_caption():
    markup = render(Table("Steps", COLUMNS, ROWS, "a note"), "t")
    assert cells(markup)[:4] == ["name", "step ms", "spread", "check"]  # a column without a value is left out
    assert cells(markup)[4:8] == ["b", "1,234", "(1234.5, 2.0)", "ok"]
    assert '<caption id="t-caption"><span>Steps</span></caption>' in markup
    assert 'role="region" tabindex="0" id="t" aria-labelledby="t-caption"' in markup
    assert markup.count('scope="col"') == 4 and markup.count('scope="row"') == 3
    assert markup.endswith('<p class="note">a note</p>')


def test_numbers_are_sorted_by_their_value_and_not_by_their_text():
    markup = render(Table("Steps", COLUMNS, ROWS), "t")
    assert re.findall(r'data-value="(.*?)"', markup) == ["1234.5", "1234.5", "0.5", "0.5"]


def test_what_is_wrong_is_said_in_words_at_both_ends_of_its_row():
    _, wrong, not_run = render(Table("Steps", COLUMNS, ROWS), "t").split("<tr")[2:]
    assert 'class="bad"' in wrong and 'class="not-run"' in not_run
    assert cells(wrong) == ["a ✗ WRONG", "–", "–", "✗ WRONG: weights differ"]
    assert cells(not_run)[0] == "c not run"


def test_a_long_table_scrolls_both_ways():
    assert 'class="scroll"' in render(Table("t", COLUMNS, ROWS), "t")
    assert 'class="scroll tall"' in render(Table("t", COLUMNS, ROWS * 20), "t")
