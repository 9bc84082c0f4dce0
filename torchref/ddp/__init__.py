"""Data parallelism with replicated parameters: four strategies, one file each."""

# isort: skip_file
# From the simplest to the one to use: STRATEGIES lists them in the order of these imports.
from .naive import NaiveDDP as NaiveDDP
from .flat import FlatDDP as FlatDDP
from .overlapped import OverlappedDDP as OverlappedDDP
from .bucketed import BucketedDDP as BucketedDDP
