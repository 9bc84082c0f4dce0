"""Data parallelism with replicated parameters: four strategies, from the simplest to the one to use."""

from .bucketed import BucketedDDP as BucketedDDP
from .flat import FlatDDP as FlatDDP
from .naive import NaiveDDP as NaiveDDP
from .overlapped import OverlappedDDP as OverlappedDDP
