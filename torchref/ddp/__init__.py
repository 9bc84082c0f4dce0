"""Data parallelism with replicated parameters: four strategies, from the simplest to the one to use.

naive.py        one all-reduce per parameter, after the backward
flat.py         one all-reduce of everything, after the backward
overlapped.py   one all-reduce per parameter, during the backward
bucketed.py     one all-reduce per bucket, during the backward
"""

from .bucketed import BucketedDDP as BucketedDDP
from .flat import FlatDDP as FlatDDP
from .naive import NaiveDDP as NaiveDDP
from .overlapped import OverlappedDDP as OverlappedDDP
