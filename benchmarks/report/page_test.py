"""The page as a parser sees it: sound HTML that fetches nothing, with everything named that needs a name."""

import math
import random
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from benchmarks.report import conftest as factories
from benchmarks.report import write_report
from benchmarks.report.page import render
from benchmarks.report.runs import RunRows, read_run

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Collects the elements of a page, each with its attributes and those around it."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> within {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag):
        return [attributes for name, attributes, _ in self.elements if name == tag]


@pytest.fixture(scope="module", params=["one run", "two runs"])
def page(request, full_run, tmp_path_factory):
    """The text of a page and what a parser makes of it."""
    path = tmp_path_factory.mktemp("page") / "new" / "report.html"
    folders = [full_run]
    if request.param == "two runs":
        folders.append(factories.write_full_run(tmp_path_factory.mktemp("other") / "20260103-all"))
    write_report(folders, path)
    text = path.read_text(encoding="utf-8")
    return text, Reader(text)


def test_it_is_one_small_file_that_refers_to_nothing_outside(page):
    text, reader = page
    assert len(text) < 2**20 and text.startswith("<!doctype html>\n")
    assert not {"img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _, _ in reader.elements}
    for tag, attributes, _ in reader.elements:
        assert "src" not in attributes and "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
        if "href" in attributes:
            assert attributes["href"].startswith("#") or (tag, attributes["href"]) == ("link", "data:,")
    assert not re.search(r"@import|url\((?!#)", text)
    (policy,) = [one["content"] for one in reader.all("meta") if one.get("http-equiv")]
    assert policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy


def test_what_files_say_is_text_and_never_markup(page):
    text, reader = page
    assert len(reader.all("script")) == 1
    assert factories.HOSTILE not in text
    assert any(factories.HOSTILE in data for tag, data in reader.texts if tag == "td")


def test_ids_are_unique_and_everything_that_is_referred_to_is_there(page):
    _, reader = page
    ids = [attributes["id"] for _, attributes, _ in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in reader.elements:
        for name in attributes.get("aria-labelledby", "").split():
            assert name in ids
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids


def test_no_paragraph_or_cell_is_empty(page):
    text, _ = page
    assert not re.search(r"<(p|td|th|li|dd|h\d)[^>]*></\1>", text)


def test_headings_are_in_order_and_landmarks_are_there(page):
    _, reader = page
    levels = [int(tag[1]) for tag, _, _ in reader.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(reader.all(landmark)) == 1
    first_link = next(attributes for tag, attributes, _ in reader.elements if tag == "a")
    assert first_link == {"href": "#results", "class": "skip"}
    assert reader.all("html") == [{"lang": "en"}]


def test_tables_have_captions_scopes_and_a_box_to_scroll_in(page):
    _, reader = page
    tables = reader.all("table")
    assert len(tables) == len(reader.all("caption")) > 15
    assert all(one.get("scope") in ("row", "col") for one in reader.all("th"))
    boxes = [one for one in reader.all("div") if "scroll" in one.get("class", "")]
    assert len(boxes) == len(tables)
    assert all(one["tabindex"] == "0" and one["role"] == "region" for one in boxes)


def test_plots_have_a_title_a_description_and_their_numbers(page):
    text, reader = page
    plots = [one for one in reader.all("svg") if one.get("role") == "img"]
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(plots) == len(figures) > 15
    for figure in figures:
        title, description = re.search(r"<title id=\S+>(.+?)</title><desc id=\S+>(.*?)</desc>", figure).groups()
        assert title and description
        assert "The numbers of this plot" in figure
    others = [one for one in reader.all("svg") if one.get("role") != "img"]
    assert all(one["aria-hidden"] == "true" for one in others)


def test_what_did_not_work_out_is_said_at_the_top(page):
    text, reader = page
    top = text.split("<nav")[0]
    for words in (
        "251 rows, of which 3 failed, wrong or missed; 1 could not be run.",
        "main, jaxddp, naive 7 MiB, XLA in-process, 2 ranks: WRONG: weights differ by more than 1e-03",
        "main, torchref, fully_shard, Gloo, 2 ranks: FAILED: rank 1 of 2 failed: no network",
        "main, 2 ranks: not run: there is no GPU",
        "gates, torchref bucketed / DistributedDataParallel: MISSED",
    ):
        assert words in top
    assert "main/metrics.jsonl, line 18: no JSON object, skipped" in text


def test_a_row_that_is_wrong_has_no_bar(page):
    text, _ = page
    assert "123 ms" not in text
    assert "✗ WRONG, see the table" in text


def test_the_same_rows_give_the_same_page(full_run):
    assert render([read_run(full_run)]) == render([read_run(full_run)])


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fields_hold_there_is_a_page(seed, full_run):
    odd = [None, 0, -1, 1e300, 1e-300, math.nan, math.inf, "", "text", [], [1], [["a"]], [["a", 1]], {}, {"a": 1}, True]
    choices = random.Random(seed)
    run = read_run(full_run)
    changed = [
        {
            key: choices.choice(odd) if key != "benchmark" and choices.random() < 0.1 else value
            for key, value in one.items()
        }
        for one in run.rows
    ]
    Reader(render([RunRows("changed", changed), run]))


def test_what_ran_in_a_lab_has_sections_of_its_own(full_run):
    reader = Reader(render([read_run(full_run)]))
    titles = [data for tag, data in reader.texts if tag == "h2"]
    at = titles.index("The network, in a lab with links of 1000 Mbit/s")
    assert titles[at:] == [
        "The network, in a lab with links of 1000 Mbit/s",
        "Bucket sizes, in a lab with links of 1000 Mbit/s",
        "Collectives by size, in a lab with links of 1000 Mbit/s",
    ]
    assert "Bucket sizes" in titles[:at] and "Collectives by size" in titles[:at]
    ids = {attributes.get("id") for _, attributes, _ in reader.elements}
    assert {"buckets", "buckets-1000-mbit", "lab-1000-mbit"} <= ids


def test_what_is_wrong_in_a_lab_says_so(tmp_path):
    write_run = factories.write_run
    bad = [one | {"check": "WRONG: x"} for one in factories.steps("buckets")[:1]]
    missing = [factories.row("buckets") | {"check": "not run: y"}]
    write_run(tmp_path / "lab", buckets=factories.in_lab(bad + missing))
    write_run(tmp_path, buckets=bad + missing)
    top = render([read_run(tmp_path)]).split("<nav")[0]
    for words in (
        "<li>buckets, jaxddp, naive, XLA in-process, 2 ranks: WRONG: x</li>", "<li>buckets, 2 ranks: not run: y</li>",
        "<li>buckets at 1000 Mbit/s, jaxddp, naive, XLA over Gloo, 2 ranks: WRONG: x</li>",
        "<li>buckets at 1000 Mbit/s, 2 ranks: not run: y</li>",
    ):  # fmt: skip
        assert words in top


def test_long_lists_of_faults_are_cut(tmp_path):
    rows = [factories.row("races", part=str(index)) | {"check": "FAILED: x"} for index in range(50)]
    top = render([read_run(factories.write_run(tmp_path, races=rows))]).split("<nav")[0]
    assert top.count("<li>") == 21 and "and 30 more" in top


def test_what_could_not_be_run_for_one_reason_makes_one_line(tmp_path):
    rows = [factories.row("races", part=str(index)) | {"check": "not run: no horses"} for index in range(3)]
    top = render([read_run(factories.write_run(tmp_path, races=rows))]).split("<nav")[0]
    assert "<li>races, 0 and 2 other rows: not run: no horses</li>" in top and top.count("<li>") == 1
