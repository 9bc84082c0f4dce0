"""Damaged texts of compiled programs: read, or refused in one line, and soon."""

import random
import re

import pytest

from jaxddp.conftest import fuzz_seeds, soon
from jaxddp.instruments.hlo import HLOError
from jaxddp.instruments.schedule import read_schedule
from jaxddp.instruments.testdata import fixture_names, load_fixture

SMALL = [name for name in fixture_names() if name.split("-")[1] in ("loop", "collectives", "products")]
ALL = [*SMALL, *(name for name in fixture_names() if name.split("-")[1] in ("microbatch", "auto"))]
LONGEST_S = 1.0  # of processor time


def damage(text, rng):
    """One change that a disk, an editor or another compiler might make."""
    lines, at = text.split("\n"), rng.randrange(len(text))
    line, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    number = rng.choice(list(re.finditer(r"\d+", text)))
    words = list(re.finditer(r"[A-Za-z_.-]+", text))
    word, another = rng.choice(words), rng.choice(words)

    def in_place_of(match, new):
        return text[: match.start()] + new + text[match.end() :]

    swapped = [lines[{line: other, other: line}.get(place, place)] for place in range(len(lines))]
    return rng.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at],
            text[:at] + rng.choice("{}()[],=%") + text[at:],
            "\n".join(lines[:line] + lines[line + 1 :]),
            "\n".join([*lines[:line], *lines[line : line + 1], *lines[line:]]),
            "\n".join(swapped),
            in_place_of(number, str(rng.randrange(100))),
            in_place_of(number, str(10 ** rng.randrange(9, 25))),
            in_place_of(number, "-" + number[0]),
            in_place_of(word, another[0]),
        ]
    )


def check(seed, names):
    rng = random.Random(seed)
    name = rng.choice(names)
    text = damage(load_fixture(name), rng)
    with soon(f"{name} damaged by seed {seed}", LONGEST_S):
        try:
            read_schedule(text)
        except HLOError as error:
            assert "\n" not in str(error) and str(error), (name, seed)


def test_damaged_texts():
    for seed in range(150):
        check(seed, SMALL)


@pytest.mark.full
def test_a_minute_of_damaged_texts():
    for seed in fuzz_seeds("damaged texts"):
        check(seed, ALL)
