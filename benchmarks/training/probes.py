"""What is timed beside training, to predict its steps: see ``buckets.py``."""

FORWARD_BACKWARD = "forward and backward"
AT_ONCE = "forward and backward beside all-reduces"
NUM_PROBED = 4  # all-reduces in a row that a probe times at once


def all_reduce_label(num_bytes: int) -> str:
    """The probe of ``NUM_PROBED`` all-reduces of so many bytes each."""
    return f"all-reduce {num_bytes}"
