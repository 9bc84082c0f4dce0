"""The page of a run: one HTML file that opens offline, made from the run's rows alone.

page.py, page.css, page.js                       the page
sections.py, section.py                          one section per experiment: its sentences, figures and tables
runs.py, comparison.py, environment.py           rows of runs; two runs compared; what their numbers depend on
figure.py, axis.py, bars.py, lines.py, lanes.py  figures as SVG
table.py, markup.py                              tables and HTML
steps.py, ratio.py, sentences.py                 rows of training steps; ratios with intervals; sentences from numbers
published.py, published.json                     the assignment report's figures beside ours
command.py                                       ``python -m benchmarks report``
"""

from .page import PAGE as PAGE
from .page import write_report as write_report
