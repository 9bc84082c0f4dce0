"""Data parallelism with replicated parameters: four strategies, one file each."""

# isort: skip_file
# From the simplest to the one to use: STRATEGIES lists them in the order of these imports.
from .naive import naive as naive
from .flat import flat as flat
from .overlapped import overlapped as overlapped
from .bucketed import bucketed as bucketed
