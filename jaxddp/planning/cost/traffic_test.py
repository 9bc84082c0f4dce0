import pytest

from jaxddp.planning.cost.testdata.closed_forms import num_gathers
from jaxddp.planning.cost.traffic import STRATEGIES, sent_bytes, traffic


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("keep_first", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 7])
def test_gathers_by_brute_force(num_layers, num_microbatches, keep_first, keep_last):
    """Layers come and go as forwards and backwards need them; whatever may stay stays."""
    resident, gathered, dropped = set(), 0, 0

    def use(layer, *, stays):
        nonlocal gathered, dropped
        gathered += layer not in resident
        resident.add(layer)
        if not stays:
            resident.discard(layer)
            dropped += 1

    for batch in range(num_microbatches):
        for layer in range(num_layers):
            use(layer, stays=keep_last and layer == num_layers - 1)
        for layer in reversed(range(num_layers)):
            use(layer, stays=keep_first and layer == 0 and batch < num_microbatches - 1)
    ours = num_gathers(num_layers, num_microbatches, keep_last=keep_last, keep_first=keep_first)
    assert (gathered, dropped) == (ours, ours)


def test_units_are_those_of_a_rings_messages():
    """What ranks really pass on of N equal chunks, a reduce-scatter and an all-gather at a time."""
    for num_ranks in (2, 3, 8):
        chunk = 12.0 / num_ranks
        one_way = sum(chunk for _ in range(num_ranks - 1))  # of each rank
        for strategy in STRATEGIES:
            gradients, parameters = traffic(strategy)
            ours = sent_bytes(traffic(strategy), 12, num_ranks, gradient_bytes=4, parameter_bytes=2)
            assert ours == pytest.approx(one_way * (4 * gradients + 2 * parameters), rel=1e-12)  # rounding


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: traffic("zero4"), r"strategy \(='zero4'\) must be one of naive, flat, "),
        (lambda: traffic("zero1", 1, "never"), r"reduce \(='never'\) must be one of every, once$"),
        (lambda: traffic("zero1", 0), r"num_microbatches \(=0\) must be a whole number, 1 or more$"),
        (lambda: sent_bytes(traffic("flat"), -1, 2), r"num_params \(=-1\) must be a finite number, 0 or more$"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        call()
