"""The processes of a job: finding it, joining it, and ending together. ``torchref`` uses all but ``start.py``."""
