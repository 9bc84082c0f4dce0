import math
import re

import numpy as np
import pytest

from jaxddp.planning.cost.checks import check_choice, check_count, check_not_negative, check_positive

NUMBERS = {
    check_positive: ("must be a positive finite number", [0, -1, math.nan, math.inf, [1, 0.0], "1", None, True]),
    check_not_negative: ("must be a finite number, 0 or more", [-1, -1e-9, math.nan, math.inf, "0", None]),
    check_count: ("must be a whole number, 1 or more", [0, -1, 1.5, math.nan, math.inf, [2, 0], "2", None, False]),
}
GOOD = {check_positive: [1, 1e-9, [2.5, 3]], check_not_negative: [0, 0.0, 7], check_count: [1, 2.0, np.arange(1, 5)]}


@pytest.mark.parametrize(("check", "bad"), [(check, bad) for check, (_, values) in NUMBERS.items() for bad in values])
def test_a_number_out_of_range_is_one_line_with_the_value_and_the_rule(check, bad):
    with pytest.raises(ValueError) as raised:
        check(first=1, second=bad)
    rule = NUMBERS[check][0]
    assert re.fullmatch(rf"second \(=.+\) {re.escape(rule)}", str(raised.value))


@pytest.mark.parametrize("check", GOOD)
def test_what_is_in_range_passes(check):
    for good in GOOD[check]:
        check(value=good)


def test_of_an_array_the_first_bad_entry_is_named():
    with pytest.raises(ValueError, match=r"^num_ranks \(=0\) must be a whole number, 1 or more$"):
        check_count(num_ranks=np.array([[3, 0], [-1, 2]]))


def test_a_choice_lists_what_there_is():
    check_choice((0, 1), stage=1)
    with pytest.raises(ValueError, match=r"^stage \(=4\) must be one of 0, 1$"):
        check_choice((0, 1), stage=4)
