# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of single layers have stock's bits and strides under every schedule, whatever
the layer is given. A sample of the cases; `python reorder_cases.py` does all of them."""

import random

import pytest
from reorder_cases import CASES, SCHEDULES, difference

SAMPLE = 120  # for each schedule


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_a_layer_have_the_bits_and_strides_of_stock(schedule):
    for case in random.Random(schedule).sample(CASES, SAMPLE):
        said = difference(case, schedule)
        assert not said, f"{case}: {said}"
