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
from clip_scripts import DTYPES, STEPS, TIGHT, backward, gradients, long_net, twin_of
from common import adamw, assert_same_tensor, everything, loss_of, net, python_ok, same
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

WAYS = pytest.mark.parametrize("at_once", (True, False), ids=("at once", "later"))


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


@WAYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", (2.0, 2, 1.0, math.inf))
@pytest.mark.parametrize("foreach", (None, True, False))
def test_all_is_done_in_one_call(request, alone, at_once, dtype, norm_type, foreach):
    if at_once:
        request.getfixturevalue("small_gradients_go_at_once")
    model, _optimizer, twin = clipped_net(dtype)
    options = {"norm_type": norm_type, "foreach": foreach}
    ours = nn.utils.clip_grad_norm_(model.parameters(), TIGHT, **options)
    stock = generated_gradients.reference(list(twin.parameters()), TIGHT, norm_type, foreach)
    assert_same_tensor("norm", ours, stock)
    assert_same_gradients(model, twin)


@WAYS
@pytest.mark.parametrize("norm_type", (2.0, 1.0, math.inf))
def test_parameters_that_nobody_has_fused_are_in_the_same_call(request, alone, at_once, norm_type):
    if at_once:
        request.getfixturevalue("small_gradients_go_at_once")
    torch.manual_seed(0)
    model = long_net(torch.float32)
    params = list(model.parameters())
    _optimizer = optfuse.fuse(adamw(params[1::2]))
    backward(model, 0, torch.float32)
    twin = twin_of(model)
    ours = nn.utils.clip_grad_norm_(params, TIGHT, norm_type)
    stock = generated_gradients.reference([*twin.parameters()], TIGHT, norm_type, None)
    assert_same_tensor("norm", ours, stock)
    assert_same_gradients(model, twin)


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


def mixed_net():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(n)) for n in (33, 70, 1, 3, 5000, 17, 210, 64)]
    for i, p in enumerate(params):
        p.data = p.data.to(DTYPES[(3 * i + i // 4) % 4])
    return nn.ParameterList(params)


@WAYS
@pytest.mark.parametrize("norm_type", (2.0, 1.0, math.inf))
@pytest.mark.parametrize("double", (True, False), ids=("with float64", "without"))
def test_mixed_dtypes_are_clipped_in_one_call(request, alone, at_once, norm_type, double):
    """Parameters without dimensions, too, which a wider factor multiplies in its dtype."""
    if at_once:
        request.getfixturevalue("small_gradients_go_at_once")
    params = [p for p in mixed_net() if double or p.dtype != torch.float64]
    params += [nn.Parameter(torch.zeros((), dtype=p.dtype)) for p in params[:4]]
    _optimizer = optfuse.fuse(torch.optim.SGD(params, lr=0.1, foreach=False))
    for p in params:
        p.grad = torch.randn(p.shape, dtype=torch.float64).to(p.dtype)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, twins, strict=True):
        q.grad = p.grad.clone()
    ours = nn.utils.clip_grad_norm_(params, TIGHT, norm_type)
    assert_same_tensor("norm", ours, generated_gradients.reference(twins, TIGHT, norm_type, None))
    for p, q in zip(params, twins, strict=True):
        assert_same_tensor("gradient", p.grad, q.grad)


def test_a_function_that_was_imported_before_gains_too(alone):
    if is_left_to_torch(torch.float32, 2.0):
        pytest.skip("PyTorch's norm has other roundings here; its function is used")
    model, _optimizer, twin = clipped_net()
    ours = stock_clip_grad_norm_(model.parameters(), TIGHT)
    assert_same_tensor(
        "norm", ours, generated_gradients.reference([*twin.parameters()], TIGHT, 2.0, None)
    )
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("foreach", (None, False))
@pytest.mark.parametrize("limit", (1e-3, 0.0, -0.0))
def test_values(limit, foreach, alone):
    """Zeros of both signs are clipped to zero, too."""
    model, _optimizer, twin = clipped_net()
    for p in (*model.parameters(), *twin.parameters()):
        p.grad.view(-1)[::3], p.grad.view(-1)[1::3] = 0.0, -0.0
    nn.utils.clip_grad_value_(model.parameters(), limit, foreach=foreach)
    stock_clip_grad_value_(twin.parameters(), limit, foreach=foreach)
    assert_same_gradients(model, twin)


@WAYS
@pytest.mark.parametrize("scales", (True, False), ids=("GradScaler", "unscaled"))
def test_whole_trainings(request, at_once, scales):
    if at_once:
        request.getfixturevalue("small_gradients_go_at_once")

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", enabled=scales, growth_interval=2)
        for i in range(2 * STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 3:
                model[0].weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            yield "norm", nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
            if i % 3 == 2:
                yield "gradients", gradients(model)
            scaler.step(optimizer)
            scaler.update()
            yield "scale", scaler.get_scale()
        yield from everything(model, optimizer)

    same(script)


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


def test_an_error_changes_nothing():
    model, _optimizer, twin = clipped_net()
    for m in (model, twin):
        m[0].weight.grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), TIGHT, error_if_nonfinite=True)
    assert_same_gradients(model, twin)


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


def test_parameters_that_are_not_fused():
    model, optimizer, twin = clipped_net()
    strange = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for p in strange:
        p.grad = torch.ones(3)
    nn.utils.clip_grad_norm_([*model.parameters(), strange[0]], TIGHT)
    generated_gradients.reference([*twin.parameters(), strange[1]], TIGHT, 2.0, None)
    assert_same_gradients(model, twin)
    assert_same_tensor("gradient", strange[0].grad, strange[1].grad)
    optfuse.unfuse(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), TIGHT / 2)
    generated_gradients.reference([*twin.parameters()], TIGHT / 2, 2.0, None)
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("max_norm", (-1.0, torch.tensor(TIGHT), "0.05"))
def test_odd_arguments(max_norm):
    model, _optimizer, twin = clipped_net()
    ours = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    stock = generated_gradients.reference([*twin.parameters()], float(max_norm), 2.0, None)
    assert_same_tensor("norm", ours, stock)
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


def test_parameters_without_a_gradient_may_be_anybodys(alone):
    """As those that are frozen, which no optimizer has."""
    model, _optimizer, twin = clipped_net()
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    ours = nn.utils.clip_grad_norm_([frozen, *model.parameters()], TIGHT)
    stock = generated_gradients.reference([*twin.parameters()], TIGHT, 2.0, None)
    assert_same_tensor("norm", ours, stock)
    assert_same_gradients(model, twin)


def test_a_gradient_that_another_parameters_update_will_change():
    """Its memory is that parameter's, and no operator has seen it since step()."""

    def script(wrap):
        torch.manual_seed(0)
        p, q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        optimizers = [wrap(torch.optim.SGD([x], lr=1.0, fused=True)) for x in (p, q)]
        q.grad = torch.full((4,), 30.0)
        optimizers[1].step()
        p.grad = q.data
        yield "norm", nn.utils.clip_grad_norm_([p], 0.5)
        yield "gradient", p.grad

    same(script, "forward", prove=False)


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
