"""Collectives, buckets, shards, reductions and compression."""
