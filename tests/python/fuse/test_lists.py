# SPDX-License-Identifier: BSD-3-Clause
"""Lists of Python, as the library looks at them (shim/python/lists.c)."""

import random

import pytest
import torch
from torch import Tensor, nn

from optfuse._library.bindings import lib_with_gil

are_of, are_once = lib_with_gil.of_shim_are_of, lib_with_gil.of_shim_are_once


class Subclass(Tensor):
    pass


def test_items_of_two_types():
    tensor, parameter = torch.ones(1), nn.Parameter(torch.ones(1))
    assert are_of([], Tensor, nn.Parameter)
    assert are_of([tensor, parameter, tensor], Tensor, nn.Parameter)
    for other in (torch.ones(1).as_subclass(Subclass), nn.Buffer(torch.ones(1)), None, 1, Tensor):
        kind = type(other)
        expected = kind in (Tensor, nn.Parameter)
        assert are_of([tensor, other, parameter], Tensor, nn.Parameter) is expected


@pytest.mark.parametrize("n", (0, 1, 2, 7, 8, 9, 100, 3000))
def test_items_that_come_twice(n):
    objects = [object() for _ in range(n)]
    random.Random(n).shuffle(objects)
    assert are_once(objects, None)
    assert not are_once([*objects, None], None)
    for at in (0, n // 2, n - 1):
        if n:
            assert not are_once([*objects, objects[at]], None)
            assert not are_once(objects, objects[at])


def test_what_is_no_list():
    for function, rest in ((are_of, (Tensor, Tensor)), (are_once, (None,))):
        with pytest.raises(SystemError):
            function((1, 2), *rest)
