# SPDX-License-Identifier: BSD-3-Clause
"""fuse() looks at the bits of a few updates on the GPU itself before it promises
any, and refuses what is off. cxx.cpp has the same for programs in C++."""

import contextlib
import itertools

import gpu
import pytest
import torch
from common import adamw, sgd
from gpu import NAME
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.utils._python_dispatch import TorchDispatchMode

import optfuse
from optfuse_tools.ab.interval import median_interval

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ADAMW = torch.ops.aten._fused_adamw_.default
_numbers = itertools.count(1)


def optimizer(dtype=torch.float32, make=adamw, **options):
    """With options that no trial has had, unless they are given."""
    options = {"weight_decay": 0.1 + next(_numbers) / 1024, **options}
    return make([torch.ones(9, device=NAME, dtype=dtype, requires_grad=True)], **options)


@contextlib.contextmanager
def stock(operator, then=lambda *_: None, **changed):
    """PyTorch's operator with other arguments, and something done to its tensors afterwards. Yields
    a list with an entry for each call."""
    calls = []

    def instead(*args, **options):
        calls.append(options)
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.BackendSelect)):
            operator(*args, **{**options, **changed})
        then(*args)

    library = torch.library.Library("aten", "IMPL")
    library.impl(operator.name().removesuffix(".default"), instead, "BackendSelect")
    try:
        yield calls
    finally:
        library._destroy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("maximize", [False, True])
def test_equal_bits_are_seen(make, dtype, maximize):
    fused = optfuse.fuse(optimizer(dtype, make, maximize=maximize), strict=True)
    assert optfuse.summary(fused).gpu_bits_differ == ()


def test_the_trial_runs_what_training_does():
    """Several tensors a launch; those whose steps the GPU counts, and the others."""
    launched = gpu.kernels(lambda: optfuse.fuse(optimizer()))
    assert launched.count("of_cuda_advance_steps") == 3, launched
    assert launched.count("of_cuda_adam_float32_3_small") == 2 * 3, launched


@pytest.mark.parametrize("of", range(12))
def test_one_bit_of_one_element_is_told_and_refused_if_strict(of):
    def flip(params, *_):
        last = params[of][-1:]
        last.copy_(last.cpu().nextafter(torch.full((1,), torch.inf)))

    options = {"weight_decay": 0.2 + of / 64}
    third = stock(ADAMW, then=lambda *lists: len(calls) == 3 and flip(*lists))
    with third as calls, pytest.warns(UserWarning, match="float32 on fakecuda:0 round differently"):
        fused = optfuse.fuse(optimizer(**options))
    assert "float32 on fakecuda:0 round differently" in str(optfuse.summary(fused))
    with pytest.raises(optfuse.Error, match="strict=True, but updates of float32 on fakecuda:0"):
        optfuse.fuse(optimizer(**options), strict=True)  # known by now


WRONG = [{"lr": 0.011}, {"beta1": 0.8}, {"weight_decay": 0.5}, {"maximize": True}]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_update_is_refused(wrong, dtype):
    plain = optimizer(dtype)
    said = r"parameter 0 of group 0 .*far more than rounding; nothing was fused"
    with stock(ADAMW, **wrong), pytest.raises(optfuse.Error, match=said):
        optfuse.fuse(plain)
    assert type(plain) is torch.optim.AdamW
    optfuse.fuse(plain, strict=True)  # a refusal is not kept


def test_gradients_that_the_update_does_not_clip_are_refused(monkeypatch):
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "factors")
    with pytest.raises(optfuse.Error, match="far more than rounding"):
        optfuse.fuse(optimizer(make=sgd))


def test_a_trial_of_nothing_but_nan_is_refused():
    with pytest.raises(optfuse.Error, match="nothing but NaN and compared nothing"):
        optfuse.fuse(optimizer(weight_decay=float("inf")))


def test_each_set_of_options_is_looked_at_once():
    with stock(ADAMW) as calls:
        optfuse.fuse(optimizer(weight_decay=0.3))
        assert len(calls) == 3
        optfuse.fuse(optimizer(weight_decay=0.3, lr=0.5))
        assert len(calls) == 3
        optfuse.fuse(optimizer(weight_decay=0.3, amsgrad=True))
        assert len(calls) == 6


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators.append(operator)
        return operator(*args, **kwargs or {})


def test_modes_of_the_script_are_none_of_the_trials():
    with stock(ADAMW) as calls, Seen() as seen:
        optfuse.fuse(optimizer(), strict=True)
    assert len(calls) == 3 and ADAMW not in seen.operators
    with torch.inference_mode():
        optfuse.fuse(optimizer(), strict=True)


def test_fused_where_new_tensors_go_to_the_gpu_by_default():
    """As after torch.set_default_device("cuda"), whose operators take no generator
    of the CPU."""
    with torch.device(NAME):
        optimizer_there = optfuse.fuse(optimizer())
        with pytest.raises(RuntimeError, match="expected a generator of this device"):
            torch.randn(3, generator=torch.Generator("cpu"))
    assert optfuse.summary(optimizer_there).gpu_bits_differ == ()


def test_what_else_draws_numbers_does_so_on_the_cpu():
    with torch.device(NAME):
        assert median_interval([2.0, 4.0]).median == 3.0
