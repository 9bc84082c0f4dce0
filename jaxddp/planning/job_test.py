import pytest

from jaxddp import targets
from jaxddp.planning.cost.workload import feed_forward
from jaxddp.planning.job import Job
from jaxddp.planning.machine import cluster_of

MODEL = feed_forward(64, 256)
CLUSTER = cluster_of(targets.target("v5p:64"), "bfloat16")


@pytest.mark.parametrize(
    ("options", "ranks", "data_ranks"),
    [
        ({"fsdp": 16, "tp": 4}, (16, 4, 1), 16),
        ({"fsdp": 4, "tp": 4}, (4, 4, 4), 16),
        ({"fsdp": 16, "tp": 4, "stage": 1}, (1, 4, 16), 16),
        ({"fsdp": 1, "tp": 4}, (1, 4, 16), 16),
        ({"fsdp": 1, "tp": 64}, (1, 64, 1), 1),
    ],
)
def test_what_does_not_gather_sums_gradients(options, ranks, data_ranks):
    job = Job(MODEL, CLUSTER, **options)
    assert (job.ranks, job.num_data_ranks) == (ranks, data_ranks)
    assert job.gathers == (ranks[0] > 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp": 0}, "fsdp (=0) must be a whole number, 1 or more"),
        ({"fsdp": 3}, "fsdp x tp (=3 x 1) must divide the 64 devices of v5p:64"),
        ({"fsdp": 16, "tp": 8}, "fsdp x tp (=16 x 8) must divide the 64 devices of v5p:64"),
        ({"fsdp": 4, "stage": 5}, "stage (=5) must be one of 0, 1, 2, 3"),
        ({"fsdp": 4, "tokens": 0}, "tokens (=0) must be a whole number, 1 or more"),
        ({"fsdp": 4, "accumulation_steps": -1}, "accumulation_steps (=-1) must be a whole number, 1 or more"),
        (
            {"fsdp": 4, "tokens": 63},
            "tokens (=63) must be at least sequence length x data ranks x accumulation steps (=1 x 64 x 1)",
        ),
        (
            {"fsdp": 4, "tokens": 1280, "sequence_length": 10, "accumulation_steps": 4},
            "tokens (=1280) must be a multiple of sequence length x data ranks x accumulation steps (=10 x 64 x 4)",
        ),
        ({"fsdp": 4, "num_gathered_units": 0}, "num_gathered_units (=0) must be a whole number, 1 or more"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(ValueError) as raised:
        Job(MODEL, CLUSTER, **options)
    assert str(raised.value) == said
