import re

import pytest

from jaxddp.comparison_test import refusal
from jaxddp.instruments.hlo import parse_module
from jaxddp.instruments.testdata import fixture_names, handmade, load_fixture

ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""


def parse_entry(*lines, others=""):
    return parse_module(handmade(*lines, others=others)).entry


@pytest.mark.parametrize("name", fixture_names())
def test_every_line_of_the_fixtures_is_read(name):
    text = load_fixture(name)
    module = parse_module(text)
    assert len(re.findall(r"^(?:ENTRY )?%.*\{$", text, re.MULTILINE)) == len(module.computations)
    read = [line for computation in module.computations.values() for line in computation.values()]
    printed = re.findall(r"^  (?:ROOT )?%(\S+) = .*? ([a-z][a-z0-9-]*)\(", text, re.MULTILINE)
    assert [(line.name, line.opcode) for line in read] == printed
    # What is taken apart can be put together again, so nothing was lost on the way.
    again = [
        f"{'ROOT ' if line.is_root else ''}%{line.name} = {line.shape} {line.opcode}({line.literal})"
        + (f", {line.attributes}" if line.attributes else "")
        for line in read
    ]
    assert again == [line.strip() for line in text.splitlines() if line.startswith("  ")]


def test_an_instruction_is_taken_apart():
    lines = parse_entry(
        '%c = (f32[2,3]{1,0}, /*index=1*/s32[]) custom-call(), custom_call_target="f(x) {", '
        'metadata={op_name="jit(f)/a \\"b\\" (c" source_file="a.py" source_line=3}, '
        'backend_config={"known_trip_count":{"n":"5"},"is_sync":true,"name":"K"}',
        "%x = f32[2,3]{1,0:T(8,128)S(1)} get-tuple-element(%c), index=0",
        "ROOT %y.1 = (bf16[4,2]{1,0}, pred[]) custom-call(%x, /*index=1*/%c), window={size=3x3 pad=1_1x0_0}, "
        "dimensions={0,2}, replica_groups=mesh['data'=2,'model'=4] {'data'}, use_global_device_ids=true",
    )
    assert list(lines) == ["c", "x", "y.1"]
    call, x, y = lines.values()
    assert (call.operands, call.literal, call.opcode, call.source) == ((), "", "custom-call", "a.py:3")
    assert call.attribute("custom_call_target") == "f(x) {"
    assert call.op_name == 'jit(f)/a \\"b\\" (c'
    assert [call.attribute(key) for key in ("n", "is_sync", "name", "no")] == ["5", "true", "K", ""]
    assert call.integers("known_trip_count") == (5,)
    assert (x.shape, x.operands, x.integers("index")) == ("f32[2,3]{1,0:T(8,128)S(1)}", ("c",), (0,))
    assert (y.operands, y.is_root, x.is_root) == (("x", "c"), True, False)
    assert y.num_bytes == 4 * 2 * 2 + 1
    assert y.attribute("window") == "size=3x3 pad=1_1x0_0"
    assert y.integers("dimensions") == (0, 2)
    assert y.attribute("window_strides") == "" == y.op_name


def test_what_calls_what():
    lines = parse_entry(
        "%x = f32[] parameter(0)",
        '%w = f32[] while(%x), condition=%add, body=%add, metadata={op_name="calls=%no"}',
        "%i = f32[] conditional(%x, %x, %x), branch_computations={%add, %add}",
        "%j = f32[] conditional(%x, %x, %x), true_computation=%add, false_computation=%add",
        "ROOT %c = f32[] custom-call(%x), called_computations={%add}",
        others=ADD,
    )
    add, called = lines["x"].module.computations["add"], {name: line.called for name, line in lines.items()}
    assert called == {"x": [], "w": [add, add], "i": [add, add], "j": [add, add], "c": [add]}


def test_text_that_is_cut_off_anywhere():
    text = load_fixture("tpu-loop-jax0.10")
    end = text.rindex("}")
    for cut in range(0, end + 1, 7):
        assert ("cut off" if cut > 8 else "compiled HLO module") in refusal(parse_module, text[:cut])
    assert parse_module(text[: end + 1]) == parse_module(text)


X, Z = "%x = f32[] parameter(0)", "ROOT %z = f32[] negate(%x)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @jit_f {\n}\n", r"must be a compiled HLO module, as Compiled.as_text\(\) gives it"),
        (handmade(f"ROOT {X}").replace(", is_scheduled=true", ""), r"not scheduled: compile it first"),
        (handmade(X, "%y = ", Z), "line 5 .*'%y =.* is no instruction"),
        (handmade("%x = f32[] negate(%y", Z), "line 4 .* is no instruction"),
        (handmade(f"ROOT {X}", others=ADD + ADD), "line 9 begins 'add' again: it must be one HLO module"),
        ("HloModule m, is_scheduled=true\n\n" + ADD, "cut off"),
    ],
)
def test_text_with_something_missing(text, message):
    assert re.search(message, refusal(parse_module, text))
