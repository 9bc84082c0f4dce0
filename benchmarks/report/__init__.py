"""The report of a run: one page that opens offline, made from the run's rows alone.

page.py, page.css, page.js           the page
sections.py, section.py, plain.py    one section per experiment; its sentences, figures and tables; rows as they are
runs.py, experiment.py, comparison.py, environment.py   rows of runs; two runs compared; what runs depend on
figure.py, axis.py, bars.py, lines.py, lanes.py         figures as SVG
table.py, markup.py                  tables and HTML
steps.py, ratio.py, sentences.py     rows of steps; ratios with intervals; sentences made from numbers
source.py, source.json               the assignment report's figures beside ours
command.py                           ``python -m benchmarks report``
"""

from .page import PAGE as PAGE
from .page import write_report as write_report
