import numpy as np
import pytest

from jaxddp.models import SIZES, abstract
from jaxddp.planning.cost.workload import feed_forward, transformer
from jaxddp.tree import named_leaves


@pytest.mark.parametrize("name", ["tiny", "byte", "seed_xl"])
def test_the_transformer_is_the_packages_own(name):
    config = SIZES[name]
    counts = transformer(
        config.vocab, config.context, config.width, config.num_layers, config.num_heads, config.hidden
    )  # fmt: skip
    assert counts.num_params == config.num_params
    shapes = sorted(tuple(leaf.shape) for leaf in named_leaves(abstract(config)[1]).values())
    assert sorted(shape for _, shape in counts.tensors) == shapes
    assert sum(counts.unit_params) == counts.num_params and sum(counts.unit_tensors) == len(counts.tensors)
    assert len({name for name, _ in counts.tensors}) == len(counts.tensors)


def forward(weights, x, down):
    """Of a block and its FLOPs: ``x W1 W2`` or, with three matrices, ``(sin(x W1) * x W2) W3``."""
    before = [x @ weight for weight in weights]
    middle = before[0] if len(weights) == 1 else np.sin(before[0]) * before[1]
    products = [(x, weight) for weight in weights] + [(middle, down)]
    flops = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in products)
    return middle @ down, before, middle, flops


@pytest.mark.parametrize("num_matrices", [2, 3])
def test_counts_of_a_block_are_those_of_its_products(num_matrices):
    tokens, width, hidden = 5, 6, 10
    counts = feed_forward(width, hidden, num_blocks=1, num_matrices=num_matrices)
    arrays = [np.ones(shape) for _, shape in counts.tensors]
    x = np.ones((tokens, width))
    _, before, middle, flops = forward(arrays[:-1], x, arrays[-1])
    assert flops == counts.flops_per_token * tokens
    kept = [middle] if num_matrices == 2 else [*before, middle]  # a product's middle is its own input
    assert counts.kept_per_token * tokens == x.size
    assert counts.kept_cut_per_token * tokens == sum(each.size for each in kept)


def test_a_gated_block_cut_by_columns_takes_one_sum_each_way():
    """The backward of each rank's part, as equations, against the whole block's and finite differences."""
    rng = np.random.default_rng(0)
    tokens, width, hidden, ranks = 4, 6, 8, 4
    gate, up = (rng.normal(size=(width, hidden)) for _ in range(2))
    down, x, dy = rng.normal(size=(hidden, width)), rng.normal(size=(tokens, width)), rng.normal(size=(tokens, width))

    def backward(gate, up, down):
        _, (x1, x2), z, _ = forward([gate, up], x, down)
        dz = dy @ down.T
        dx2, dx1 = dz * np.sin(x1), dz * np.cos(x1) * x2
        return dx1 @ gate.T + dx2 @ up.T, x.T @ dx1, x.T @ dx2, z.T @ dy

    def loss(gate, up, down, x):
        return float((forward([gate, up], x, down)[0] * dy).sum())

    whole = backward(gate, up, down)
    cut = [np.split(gate, ranks, axis=1), np.split(up, ranks, axis=1), np.split(down, ranks, axis=0)]
    parts = [backward(*each) for each in zip(*cut, strict=True)]
    outputs = [
        forward([each_gate, each_up], x, each_down)[0] for each_gate, each_up, each_down in zip(*cut, strict=True)
    ]
    # Sums of the same terms in another order.
    assert np.allclose(sum(outputs), forward([gate, up], x, down)[0], rtol=1e-12)  # the forward's one all-reduce
    assert np.allclose(sum(part[0] for part in parts), whole[0], rtol=1e-12)  # the backward's
    for place, axis in ((1, 1), (2, 1), (3, 0)):  # weights' gradients take none
        assert np.allclose(np.concatenate([part[place] for part in parts], axis=axis), whole[place], rtol=1e-12)
    for place, gradient in enumerate((whole[1], whole[2], whole[3], whole[0])):
        arguments = [gate, up, down, x]
        step = np.zeros_like(arguments[place])
        step[1, 2] = 1e-6
        moved = [[*arguments[:place], arguments[place] + sign * step, *arguments[place + 1 :]] for sign in (1, -1)]
        difference = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        assert difference == pytest.approx(gradient[1, 2], rel=1e-6)  # of the step's size squared, and rounding
    assert outputs[0].size == feed_forward(width, hidden, 1, 3).summed_per_token * tokens


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"width": 0}, "width (=0) must be a whole number, 1 or more"),
        ({"hidden": -4}, "hidden (=-4) must be a whole number, 1 or more"),
        ({"num_blocks": 1.5}, "num_blocks (=1.5) must be a whole number, 1 or more"),
        ({"num_matrices": 4}, "num_matrices (=4) must be one of 2, 3"),
    ],
)
def test_bad_sizes(sizes, said):
    with pytest.raises(ValueError) as raised:
        feed_forward(**{"width": 4, "hidden": 8, **sizes})
    assert str(raised.value) == said
    with pytest.raises(ValueError, match=r"^head \(='none'\) must be one of own, tied$"):
        transformer(2, 2, 2, 2, 2, 2, head="none")
