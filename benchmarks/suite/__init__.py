"""Runs of several benchmarks: the main job and all of them."""
