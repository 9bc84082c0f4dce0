"""Simulated steps: networks, timelines, the bound, and bucket caps tuned by them."""
