"""Nothing that comes from a file becomes markup."""

import pytest

from benchmarks.report.markup import Markup, escape, join, tag


def test_text_is_escaped_once():
    inner = tag("b", "<&>\"'")
    assert inner == "<b>&lt;&amp;&gt;&quot;&#x27;</b>"
    assert tag("p", inner, None, "<") == f"<p>{inner}&lt;</p>"
    assert escape(inner) is inner
    assert isinstance(join(inner, "a"), Markup)


def test_attributes():
    assert tag("a", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;"></a>'
    assert tag("td", class_="x", aria_label="y", hidden=True, title=None, id=False) == (
        '<td class="x" aria-label="y" hidden></td>'
    )
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize("letter", ["\x00", "\x1b", "\x85", "\ud800", "\uffff"])
def test_what_html_cannot_hold_is_replaced(letter):
    assert escape(f"a{letter}b") == "a\ufffdb"
    assert escape("a\tb\nc") == "a\tb\nc"
