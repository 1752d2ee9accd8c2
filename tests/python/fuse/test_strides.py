# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and state with holes or other strides, of classes with kernels: in 16 bits
PyTorch's operators round once more there."""

import pytest
import torch
from common import assert_same, refused, same
from torch import nn

import optfuse

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def transposed(x):
    return x.t().contiguous().t()


def with_holes(x):
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


LOOPS = [
    lambda params: torch.optim.RMSprop(params, foreach=False, momentum=0.9),
    lambda params: torch.optim.ASGD(params, foreach=False),
    lambda params: torch.optim.Adadelta(params, foreach=False, weight_decay=0.1),
]


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("make", LOOPS)
def test_holes_from_the_beginning(make, dtype, mode):
    def trained(wrap):
        torch.manual_seed(0)
        p = nn.Parameter(with_holes(torch.randn(9, 130).to(dtype)))
        optimizer = wrap(make([p]))
        for _ in range(5):
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()
        return p.detach().clone(), dict(optimizer.state[p])

    assert_same("all", trained(lambda o: optfuse.fuse(o, mode=mode)), trained(lambda o: o))


def test_a_group_with_holes_is_not_added_to_kernels():
    p = nn.Parameter(torch.randn(9, 130).half())
    optimizer = optfuse.fuse(torch.optim.RMSprop([p], foreach=False))
    with pytest.raises(optfuse.Error, match="holes.*fuse it again with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(with_holes(p.detach().clone()))]})


def exchanged(optimizer, what, layout):
    (p,) = optimizer.param_groups[0]["params"]
    if what == "parameter":
        p.data = layout(p.detach().clone())
    elif what == "gradient":
        p.grad = layout(p.grad)
    else:
        optimizer.state[p]["square_avg"] = layout(optimizer.state[p]["square_avg"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["parameter", "gradient", "state"])
@pytest.mark.parametrize("layout", [with_holes, transposed])
def test_strides_that_come_later_are_refused_by_kernels_in_16_bits(layout, what, dtype):
    """PyTorch's operators round there once more; in other dtypes they don't."""

    def script(wrap):
        p = nn.Parameter(torch.linspace(-1, 1, 63).view(7, 9).to(dtype))
        optimizer = wrap(torch.optim.RMSprop([p], foreach=False, momentum=0.9, weight_decay=0.1))
        for i in range(5):
            p.grad = torch.linspace(-1, i, 63).view(7, 9).to(dtype)
            if i == 2 and (dtype == torch.float32 or wrap.fused):
                exchanged(optimizer, what, layout)
            if i == 2 and dtype != torch.float32 and wrap.fused:
                refused(optimizer.step, "holes or other strides", way_out="make them contiguous")
                exchanged(optimizer, what, torch.Tensor.contiguous)
            optimizer.step()
            yield "weights", p.detach().clone()

    same(script, prove=False)


def test_strides_of_one_element_mean_nothing():
    def script(wrap):
        p = nn.Parameter(torch.linspace(-1, 1, 7).view(7, 1).half())
        optimizer = wrap(torch.optim.RMSprop([p], foreach=False, momentum=0.9))
        for i in range(3):
            p.grad = torch.linspace(-1, i, 7).half().as_strided((7, 1), (1, 5))
            optimizer.step()
            yield "weights", p.detach().clone()

    same(script)
