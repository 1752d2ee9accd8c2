# SPDX-License-Identifier: BSD-3-Clause
"""torch.nn.utils' own functions on parameters of fused optimizers: everything in one call of the
library, with PyTorch's bits, and PyTorch's own where that can't be."""

import gc
import math
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace

import generated_gradients
import pytest
import torch
from clip_scripts import DTYPES, TIGHT, backward, long_net, twin_of
from common import adamw, assert_same_tensor, python_ok
from several import run_script
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import optfuse
from optfuse import _link
from optfuse._clipping import one_call, torch_functions
from optfuse._clipping.torch_functions import (
    stock_clip_grad_norm_,
    stock_clip_grad_value_,
)
from optfuse._library.bindings import FORWARD


def clipped_net(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = long_net(dtype)
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Forward(**options))
    backward(model, 0, dtype)
    return model, optimizer, twin_of(model)


def assert_same_gradients(model, twin):
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_tensor("gradient", p.grad, q.grad)


class OnlyForward:
    """The links without those in backward mode that earlier tests have left: beside one
    get_total_norm() is PyTorch's."""

    def values(self):
        return [link for link in _link.links.values() if link.mode == FORWARD]


@pytest.fixture
def alone(monkeypatch):
    """PyTorch's own functions are not called."""
    monkeypatch.setattr(one_call, "_link", SimpleNamespace(links=OnlyForward()))

    def fail(*_, **__):
        raise AssertionError("PyTorch's own function was called")

    for name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"):
        monkeypatch.setattr(torch_functions, f"stock_{name}", fail)


@pytest.mark.parametrize("norm_type", (2.0, 1.0, math.inf))
@pytest.mark.parametrize("dtypes", (*((dtype,) for dtype in DTYPES), DTYPES), ids=str)
def test_all_is_done_in_one_call(alone, small_gradients_go_at_once, dtypes, norm_type):
    """Also where some have no optimizer, or no gradient. Bits are deeds."""
    if is_left_to_torch(dtypes[0], norm_type):
        pytest.skip("PyTorch's norm has other roundings here; its function is used")
    params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (40, 20_000) for dtype in dtypes]
    optimizer = optfuse.fuse(torch.optim.SGD(params, lr=0.1, foreach=False))
    params += [nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(()))]
    for p in params:
        p.grad = torch.ones_like(p)
    params.append(nn.Parameter(torch.ones(3)))
    nn.utils.clip_grad_norm_(params, TIGHT, norm_type)
    if norm_type == math.inf or (norm_type, dtypes) == (2.0, (torch.float32,)):
        stock_clip_grad_norm_(params[:-3], TIGHT, norm_type)  # imported before
    nn.utils.clip_grad_value_(params, 1e-3)
    optfuse.unfuse(optimizer)


def test_where_no_parameter_is_fused_pytorchs_function_is_called(alone):
    _model, _optimizer, twin = clipped_net()
    with pytest.raises(AssertionError, match="PyTorch's own function was called"):
        nn.utils.clip_grad_norm_(twin.parameters(), TIGHT)


def is_left_to_torch(dtype, norm_type):
    by_default = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    return by_default and dtype == torch.float32 and norm_type == 2.0


def operators_of(run):
    with torch.autograd.profiler.profile() as profile:
        run()
    return {event.name for event in profile.function_events}


@pytest.mark.parametrize(
    ("dtype", "norm_type"), [(torch.float32, 2.0), *((dtype, math.inf) for dtype in DTYPES)]
)
def test_no_operator_finds_a_norm(alone, dtype, norm_type):
    """Once the trial is over."""
    if is_left_to_torch(dtype, norm_type):
        pytest.skip("PyTorch's norm has other roundings here; its operator is used")
    model, _optimizer, _twin = clipped_net(dtype)
    params = list(model.parameters())
    grads = [p.grad for p in params]
    by = "aten::linalg_vector_norm"
    nn.utils.get_total_norm(grads, norm_type)
    stock = generated_gradients.stock_get_total_norm
    assert by in operators_of(lambda: stock(grads, norm_type))
    assert by not in operators_of(lambda: nn.utils.get_total_norm(grads, norm_type))
    assert by not in operators_of(lambda: nn.utils.clip_grad_norm_(params, TIGHT, norm_type))


def test_small_gradients_are_multiplied_at_once(small_gradients_go_at_once):
    model, _optimizer, twin = clipped_net()
    kept = [p.grad.detach() for p in model.parameters()]  # and so are others of the same memory
    versions = [g._version for g in kept]
    nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    generated_gradients.reference([*twin.parameters()], TIGHT, 2.0, None)
    for g, q in zip(kept, twin.parameters(), strict=True):
        assert_same_tensor("gradient", g, q.grad)
    assert all(g._version > version for g, version in zip(kept, versions, strict=True))


def test_denormals_are_flushed_where_the_factor_is_1(small_gradients_go_at_once):
    p = nn.Parameter(torch.ones(40))
    optimizer = optfuse.fuse(adamw([p]))
    p.grad = torch.full((40,), 1e-40)
    torch.set_flush_denormal(True)
    try:
        nn.utils.clip_grad_norm_([p], 1e9)
    finally:
        torch.set_flush_denormal(False)
    assert (p.grad == 0).all()
    optfuse.unfuse(optimizer)


# Cases that are left to PyTorch


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", (Counting, Functions))
def test_a_mode_sees_pytorchs_operators(mode):
    model, _optimizer, twin = clipped_net()
    with mode() as seen:
        nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    assert not [f for f in seen.seen if "optfuse" in str(f)] and len(seen.seen) > 3
    generated_gradients.reference([*twin.parameters()], TIGHT, 2.0, None)
    assert_same_gradients(model, twin)


def test_no_parameters_at_all():
    with pytest.warns(UserWarning) as ours:
        assert nn.utils.clip_grad_norm_((p for p in ()), 1.0) == 0
    with pytest.warns(UserWarning) as stock:
        assert stock_clip_grad_norm_((p for p in ()), 1.0) == 0
    told = [[(str(w.message), w.filename) for w in found] for found in (ours, stock)]
    assert told[0] == told[1] and len(told[0]) == 1 and told[0][0][1] == __file__
    assert nn.utils.clip_grad_norm_([], 1.0) == 0


def test_what_was_imported_before_is_pickled():
    clipped_net()
    for function in (stock_clip_grad_norm_, stock_clip_grad_value_, nn.utils.clip_grad_norm_):
        assert pickle.loads(pickle.dumps(function)) is function


def test_tensors_that_stand_for_others():
    """A dual tensor's norm has a tangent; a functionalized tensor has no memory."""
    clipped_net()
    x, tangent = torch.randn(5), torch.randn(5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        norm = nn.utils.get_total_norm([dual], foreach=False)
        assert forward_ad.unpack_dual(norm).tangent is not None
    functional = torch.func.functionalize(lambda t: nn.utils.get_total_norm([t]))
    assert functional(x) == torch.linalg.vector_norm(x)
    traced = torch.jit.trace(lambda t: t / nn.utils.get_total_norm([t]), x)
    assert torch.equal(traced(2 * x), 2 * x / torch.linalg.vector_norm(2 * x))


def test_inside_compiled_code():
    model, _optimizer, twin = clipped_net()
    compiled = torch.compile(nn.utils.clip_grad_norm_, backend="eager")
    ours = compiled([*model.parameters()], TIGHT)
    assert_same_tensor(
        "norm", ours, generated_gradients.reference([*twin.parameters()], TIGHT, 2.0, None)
    )
    assert_same_gradients(model, twin)


def test_summary_says_who_finds_norms():
    model, optimizer, _ = clipped_net()
    nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    equal = torch.ops.optfuse.norms_are_torchs()
    expected = "one pass of ours" if equal else "torch's operator"
    assert optfuse.summary(optimizer).norms == expected
    assert ("torch's operator finds" in str(optfuse.summary(optimizer))) is not equal


# Bits


@pytest.mark.parametrize("capability", ("default", "avx2", "avx512"))
def test_generated_gradients(capability):
    """A sample; docs/numerics.md has the count of a whole run."""
    script = Path(__file__).with_name("generated_gradients.py")
    done = run_script([script, "400"], ATEN_CPU_CAPABILITY=capability)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ("_clip", "_clip_value"))
def test_the_optimizers_live_while_the_library_clips(monkeypatch, name):
    """Another thread may let go of one meanwhile."""
    model, *owned = clipped_net()[:2]
    known = weakref.ref(owned[0])
    alive = []
    real = getattr(one_call, name)

    def let_go_first(*args):
        owned.clear()
        gc.collect()
        alive.append(known() is not None)
        return real(*args)

    monkeypatch.setattr(one_call, name, let_go_first)
    if name == "_clip":
        nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    else:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert alive == [True]


FORKS = """
import os, signal, torch, optfuse
from torch import nn
torch.set_num_threads(2)
(torch.ones(400000) * 2).sum()  # starts threads, which a child has not
child = os.fork()
if child == 0:
    signal.alarm(300)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))  # 49,152 numbers, none large
    optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_clips():
    """On one thread, as PyTorch does where no gradient is large."""
    assert python_ok(FORKS).split() == ["0"]
