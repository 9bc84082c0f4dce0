import pytest

from jaxddp.compiled.hlo import parse_module
from jaxddp.compiled.loops import trip_count
from jaxddp.compiled.testdata import fixture_names, handmade, load_fixture

CONDITION = "%cond () -> pred[] {\n  %s = (s32[]) parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n" \
    "  %n = s32[] constant(11)\n  ROOT %r = pred[] compare(%i, %n), direction=LT\n}\n\n"  # fmt: skip
BODY = "%body () -> (s32[]) {\n  %s = (s32[]) parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n" \
    "  %k = s32[] constant(3)\n  %j = s32[] add(%i, %k)\n  ROOT %r = (s32[]) tuple(%j)\n}\n\n"  # fmt: skip


def trips(old="", new="", attributes=""):
    """Trips of a loop that counts 1, 4, 7, 10 to 11, with one thing about it changed."""
    text = handmade(
        "%one = s32[] constant(1)", "%c = s32[] copy(%one)", "%t = (s32[]) tuple(%c)",
        f"ROOT %w = (s32[]) while(%t), condition=%cond, body=%body{attributes}", others=CONDITION + BODY,
    )  # fmt: skip
    assert old in text
    module = parse_module(text.replace(old, new) if old else text)
    return trip_count(module, module.computations["main"]["w"])


def test_trips_that_are_printed():
    assert trips(attributes=', backend_config={"known_init_step":{"init":"1"},"known_trip_count":{"n":"7"}}') == 7


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("constant(11)", "constant(11)", 4),
        ("constant(11)", "constant(10)", 3),
        ("constant(3)", "constant(1)", 10),
        ("constant(11)", "constant(1)", 0),
        ("constant(11)", "constant(-5)", 0),
        ("constant(1)", "constant(-2)", 5),
    ],
)
def test_trips_that_are_counted(old, new, count):
    assert trips(old, new) == count


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%one = s32[] constant(1)", "%one = s32[] parameter(0)"),  # starts anywhere
        ("%t = (s32[]) tuple(%c)", "%t = (s32[]) parameter(0)"),
        ("%n = s32[] constant(11)", "%n = s32[] negate(%i)"),  # ends anywhere
        ("add(%i, %k)", "add(%i, %i)"),  # doubles
        ("add(%i, %k)", "add(%k, %k)"),
        ("add(%i, %k)", "multiply(%i, %k)"),
        ("constant(3)", "constant(-3)"),
        ("constant(3)", "constant(0)"),
        ("direction=LT", "direction=NE"),
        ("compare(%i, %n), direction=LT", "custom-call(%i, %n)"),
        ("compare(%i, %n)", "compare(%n, %n)"),
        ("ROOT %r = (s32[]) tuple(%j)", "ROOT %r = (s32[]) custom-call(%j)"),
    ],
)
def test_loops_that_do_not_tell(old, new):
    assert trips(old, new) is None


@pytest.mark.parametrize("name", fixture_names("*-loop-*"))
def test_a_scan_of_known_length_on_every_platform(name):
    module = parse_module(load_fixture(name))
    loops = [line for computation in module.computations.values() for line in computation.values()]
    assert [trip_count(module, line) for line in loops if line.opcode == "while"] == [5]
