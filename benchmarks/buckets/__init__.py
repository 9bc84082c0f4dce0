"""Bucket sizes, measured beside predicted."""
