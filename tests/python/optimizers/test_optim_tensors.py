# SPDX-License-Identifier: BSD-3-Clause
"""Parameters of all shapes, layouts and dtypes, for every class that fuses: a theme of
PyTorch's own test/test_optim.py. A fused optimizer and its stock twin are led
through the same and compared by bits."""

import pytest
import torch
from common import Fused, Stock, assert_same, run, same, snapshot
from optim_classes import FUSED, accepts, build, matrices
from optim_scripts import STEPS, both_modes, every_class, minimized
from torch import nn

import optfuse
from optfuse._rules import RULES


@every_class
@both_modes
def test_parameters_of_no_elements(cls, mode):
    def script(wrap):
        params = [*matrices(), nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(2, 0))]
        optimizer = wrap(build(cls, params))
        yield from minimized(params, optimizer)

    if cls.__name__ not in ("Adafactor", "Muon"):
        same(script, mode)
        return
    for wrap, error in (
        (Stock(), ZeroDivisionError),
        (Fused(mode), (ZeroDivisionError, optfuse.Error)),
    ):
        with pytest.raises(error):  # neither can stock
            run(script, wrap)


@every_class
@both_modes
def test_parameters_in_strange_layouts(cls, mode):
    """Transposed, with holes, expanded from a larger one."""

    def script(wrap):
        base = torch.randn(6, 10, 2)
        params = [
            nn.Parameter(base[..., 0]),
            nn.Parameter(torch.randn(5, 3).t()),
            nn.Parameter(torch.randn(9, 4)[::2]),
        ]
        stock = params
        if not wrap.fused and cls.__name__ in FUSED:
            # Stock's fused kernels mix up what has holes (docs/numerics.md): the
            # reference gets a dense one, with its dimensions in the same order.
            stock = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer = wrap(build(cls, stock))
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * p).sum() for p in stock).backward()
            optimizer.step()
        yield "parameters", [p.detach().contiguous() for p in stock]

    same(script, mode, prove=False)


@every_class
@both_modes
def test_parameters_of_several_dtypes(cls, mode):
    def script(wrap):
        params = [p for d in (torch.float32, torch.float64) for p in matrices(d)]
        if cls.__name__ != "SGD":  # 16 bits: stock's is broken
            params += matrices(torch.bfloat16)
        # By default Adafactor takes the epsilon of the first one's dtype for all.
        options = {"eps": (1e-20, 1e-3)} if cls.__name__ == "Adafactor" else {}
        optimizer = wrap(build(cls, params, **options))
        yield from minimized(params, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_float64_as_the_default_dtype(cls, mode):
    def script(wrap):
        torch.set_default_dtype(torch.float64)
        try:
            params = matrices(torch.float64)
            optimizer = wrap(build(cls, params))
            yield from minimized(params, optimizer)
        finally:
            torch.set_default_dtype(torch.float32)

    same(script, mode)


with_kernels = pytest.mark.parametrize("cls", list(RULES), ids=lambda c: c.__name__)


@with_kernels
@both_modes
def test_complex_parameters_are_refused(cls, mode):
    params = [nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))]
    optimizer = build(cls, params, **({"fused": False} if accepts(cls, "fused") else {}))
    with pytest.raises(optfuse.Error, match="parameter 0 of group 0 .* it is complex"):
        optfuse.fuse(optimizer, mode=mode)
    assert type(optimizer) is cls


@with_kernels
@both_modes
def test_sparse_gradients_are_refused_with_the_parameter_named(cls, mode):
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optfuse.fuse(build(cls, table.parameters()), mode=mode)
    before = snapshot(table.weight.detach())
    with pytest.raises(optfuse.Error, match=r"parameter 0 of group 0 .*sparse"):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert_same("the weight", table.weight.detach(), before)


@pytest.mark.parametrize("what", ["complex parameters", "sparse gradients"])
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_a_step_that_is_recorded_refuses_what_it_refuses_in_stock(cls, what):
    dtype = torch.complex64 if what == "complex parameters" else torch.float32
    weight = nn.Parameter(torch.randn(5, 3, dtype=dtype))
    optimizer = optfuse.fuse(build(cls, [weight]))
    before = snapshot(weight.detach())
    gradient = torch.ones_like(weight)
    weight.grad = gradient.to_sparse() if what == "sparse gradients" else gradient
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support {what}"):
        optimizer.step()
    assert_same("the weight", weight.detach(), before)
