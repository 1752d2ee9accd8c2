# SPDX-License-Identifier: BSD-3-Clause
"""torch.set_flush_denormal() sets the calling thread alone, and a thread inherits it when
it starts. An update computes as the thread of step() does, whenever and on whichever
thread it runs."""

import pytest
import torch
from clip_scripts import clip
from common import Stock, assert_same, python_ok, run, same, snapshot
from optim_classes import CLASSES, build
from own_classes import Tensors
from torch import nn

import optfuse

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ((17, 59), (3, 5))
SHORT = ((3, 5),)  # for stock's SGD in 16 bits: docs/numerics.md
MANY = ((50, 60),) * 20  # too small for several threads, but not together
MODES = ("forward", "backward")
all_classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


@pytest.fixture(autouse=True)
def denormals_kept():
    yield
    torch.set_flush_denormal(False)


class Deliver(torch.autograd.Function):
    """A backward that hands out these gradients."""

    @staticmethod
    def forward(ctx, gradients, *params):
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.gradients


def tiny(shape, dtype, seed):
    """Numbers around the smallest that is no denormal."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    decades = torch.randint(-2, 3, shape, generator=generator)
    return (numbers * 10.0 ** decades.double() * torch.finfo(dtype).tiny).to(dtype)


def script_of(make, dtype=torch.float32, sizes=SIZES, at_step=True, later=False, clips=False):
    """Denormals are flushed `at_step`, and `later`, when the update is looked at."""

    def script(wrap):
        torch.set_flush_denormal(False)
        params = [nn.Parameter(tiny(size, dtype, i)) for i, size in enumerate(sizes)]
        optimizer = wrap(make(params))
        for step in range(4):
            torch.set_flush_denormal(False)
            optimizer.zero_grad()
            gradients = [tiny(size, dtype, 100 * step + i) for i, size in enumerate(sizes)]
            torch.set_flush_denormal(at_step)
            Deliver.apply(gradients, *params).backward()
            if clips:
                yield "norm", clip(wrap, params, torch.finfo(dtype).tiny)
            optimizer.step()
            torch.set_flush_denormal(later)
            if step:  # the first one made the state
                wrap.pending()
            yield "parameters", snapshot(params)
            yield "state", optimizer.state_dict()
            if clips:
                yield "gradients", [p.grad for p in params]

    return script


def script_for(cls, **options):
    return script_of(lambda params: build(cls, params), **options)


def differences(dtypes, sizes=SIZES):
    """A process that flushes denormals from its start, where all threads do."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)
    for cls in CLASSES:
        for dtype in dtypes:
            broken = cls is torch.optim.SGD and dtype.itemsize == 2
            script = script_for(
                cls, dtype=dtype, sizes=SHORT if broken else sizes, at_step=True, later=True
            )
            for mode in MODES:
                try:
                    same(script, mode, prove=False)
                except AssertionError as error:
                    print(cls.__name__, dtype, mode, error)


# A program that never ends shall not take all memory.
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_AS, (16 << 30,) * 2)\n"


@pytest.mark.parametrize("isa", ("", "baseline"))
def test_a_process_that_flushes_from_its_start_has_the_bits_of_stock(isa):
    code = "import folders, test_flush_denormal as t; t.differences(t.DTYPES)"
    out = python_ok(LIMIT + code, OPTFUSE_ISA=isa)
    assert not out, out


def started_before(mode):
    """Stock updates small tensors on the thread that calls step(), which flushes; but with
    fused=True on all, and those that started before do not."""
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
    for cls in (torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Rprop):
        same(script_for(cls, sizes=MANY, later=True), mode, bucket_bytes=1 << 20)
    print("equal")


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_started_before_compute_as_step_does(mode):
    out = python_ok(f"import folders, test_flush_denormal as t; t.started_before({mode!r})")
    assert out.strip() == "equal", out


@all_classes
@pytest.mark.parametrize("at_step", (True, False))
def test_a_first_use_computes_as_step_did(cls, at_step):
    script = script_for(cls, at_step=at_step, later=not at_step)
    with pytest.raises(AssertionError, match="differ"):  # else it would prove nothing
        assert_same(
            "both", run(script, Stock()), run(script_for(cls, at_step=not at_step), Stock())
        )
    same(script)


@pytest.mark.parametrize("mode", MODES)
def test_a_first_use_of_an_own_step_computes_as_step_did(mode):
    optfuse.register(Tensors, per_parameter=True)
    same(script_of(lambda params: Tensors(params, lr=1e-38)), mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("isa", ("", "baseline"))
def test_clipping_computes_as_it_was_called(dtype, isa, monkeypatch):
    monkeypatch.setenv("OPTFUSE_ISA", isa)
    cls = torch.optim.AdamW
    same(script_for(cls, dtype=dtype, clips=True))
    same(script_for(cls, dtype=dtype, clips=True, at_step=False, later=True))


def test_a_first_use_leaves_its_thread_as_it_is():
    param = nn.Parameter(tiny((3, 5), torch.float32, 0))
    optimizer = optfuse.fuse(build(torch.optim.AdamW, [param]))
    for flushes in (False, True, False):
        param.grad = tiny((3, 5), torch.float32, 1)
        torch.set_flush_denormal(flushes)
        optimizer.step()
        torch.set_flush_denormal(not flushes)
        param.detach().clone()
        assert optfuse.summary(optimizer).pending == 0
        assert (torch.tensor(1e-30) * torch.tensor(1e-12) == 0) == (not flushes)
