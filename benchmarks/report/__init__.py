"""The report of a run: one page that opens offline and says what was measured, from its rows alone."""

from .page import PAGE as PAGE
from .page import write_report as write_report
