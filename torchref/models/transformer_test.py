import numpy as np
import pytest
import torch

from torchref.models import SIZES, Attention, Transformer, TransformerConfig, rotary_tables, rotate

NUM_PARAMS = {
    "tiny": 7_248,
    "byte": 4_327_680,
    "byte_shallow": 2_229_504,
    "lm_9m": 9_316_608,
    "seed_xl": 171_098_880,
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7b": 3_406_809_600,
}


def rotate_by_complex_numbers(x, theta=10_000.0):
    """RoPE, independently: features i and i + half are one complex number, turned by e^(i position frequency)."""
    half = x.shape[-1] // 2
    turned = np.empty_like(x)
    for position in range(x.shape[-2]):
        for i in range(half):
            angle = position / theta ** (2 * i / (2 * half))
            number = (x[..., position, i] + 1j * x[..., position, i + half]) * np.exp(1j * angle)
            turned[..., position, i], turned[..., position, i + half] = number.real, number.imag
    return turned


def attention_by_loops(x, num_heads, query, key, value, output):
    """Causal attention, independently: one query position at a time over the keys it may see; weights are [out, in]."""
    batch, length, width = x.shape
    size = width // num_heads
    mixed = np.zeros_like(x)
    for b in range(batch):
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            q = rotate_by_complex_numbers((x[b] @ query.T)[:, part])
            k = rotate_by_complex_numbers((x[b] @ key.T)[:, part])
            v = (x[b] @ value.T)[:, part]
            for t in range(length):
                scores = np.exp(k[: t + 1] @ q[t] / np.sqrt(size))
                mixed[b, t, part] = scores @ v[: t + 1] / scores.sum()
    return mixed @ output.T


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_exactly_the_known_number_of_parameters(name):
    config = SIZES[name]
    with torch.device("meta"):
        parameters = list(Transformer(config).parameters())
    assert sum(parameter.numel() for parameter in parameters) == config.num_params == NUM_PARAMS[name]
    assert len(parameters) == 9 * config.num_layers + 3


def test_state_dict_holds_the_parameters_in_forward_order_and_nothing_else():
    layer = [
        "attention_norm",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.output",
        "mlp_norm",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    ]
    layers = [f"layers.{index}.{name}" for index in range(2) for name in layer]
    expected = [f"{name}.weight" for name in ["embedding", *layers, "norm", "head"]]
    module = Transformer(SIZES["tiny"])
    assert list(module.state_dict()) == expected == [name for name, _ in module.named_parameters()]


def test_rotation_equals_complex_multiplication_in_float64():
    x = np.random.default_rng(0).normal(size=(2, 3, 16, 8))
    tables = rotary_tables(16, 8, torch.float64)
    got = rotate(torch.from_numpy(x).transpose(1, 2), tables).transpose(1, 2).numpy()
    # One rounding of the angle, at most 15 radians, and a few of the products.
    np.testing.assert_allclose(got, rotate_by_complex_numbers(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_the_float64_ones_rounded_once(dtype):
    for table, exact in zip(rotary_tables(128, 32, dtype), rotary_tables(128, 32, torch.float64), strict=True):
        assert table.dtype == dtype
        assert torch.equal(table, exact.to(dtype))


def test_attention_equals_loops_in_numpy_in_float64():
    config = TransformerConfig(vocab=8, context=16, width=12, num_layers=1, num_heads=3, hidden=8)
    rng = np.random.default_rng(0)
    attention = Attention(config).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=tuple(parameter.shape)) / 3))
    weights = [
        part.weight.detach().numpy() for part in (attention.query, attention.key, attention.value, attention.output)
    ]
    x = rng.normal(size=(2, 10, 12))
    got = attention(torch.from_numpy(x), rotary_tables(10, 4, torch.float64)).detach().numpy()
    # Rounding of sums of 12 products in float64, on values up to about 10.
    np.testing.assert_allclose(got, attention_by_loops(x, 3, *weights), rtol=0, atol=1e-13)


@pytest.mark.parametrize("changed", [1, 7, 15])
def test_a_later_token_does_not_change_earlier_logits(changed):
    torch.manual_seed(0)
    module = Transformer(SIZES["tiny"])
    tokens = torch.randint(64, (2, 16))
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 64
    with torch.no_grad():
        before, after = module(tokens), module(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert ((before - after).abs()[:, changed:].amax(dim=(0, 2)) > 1e-6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, r"width \(=0\) must be a positive integer"),
        ({"vocab": True}, r"vocab \(=True\) must be a positive integer"),
        ({"hidden": 2.5}, r"hidden \(=2.5\) must be a positive integer"),
        ({"num_heads": 3}, r"width \(=16\) must be divisible by num_heads \(=3\)"),
        ({"num_heads": 16}, r"width / num_heads \(=1\) must be even: RoPE turns pairs"),
    ],
)
def test_config_refuses_invalid_sizes(change, message):
    sizes = {"vocab": 64, "context": 16, "width": 16, "num_layers": 2, "num_heads": 2, "hidden": 32} | change
    with pytest.raises(ValueError, match=f"^{message}$"):
        TransformerConfig(**sizes)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"^sequence length \(=17\) must be at most context \(=16\)$"):
        Transformer(SIZES["tiny"])(torch.zeros(1, 17, dtype=torch.int64))


def test_tables_are_made_once_a_length_and_never_kept_from_inference_mode():
    model, tokens = Transformer(SIZES["tiny"]), torch.zeros(2, 8, dtype=torch.int64)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()  # tables of inference mode would raise
    (made,) = model._tables.values()
    model(tokens)
    assert [tables is made for tables in model._tables.values()] == [True]
    model(tokens[:, :4])
    assert len(model._tables) == 2 and len(model.state_dict()) == 9 * 2 + 3
