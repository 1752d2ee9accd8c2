# SPDX-License-Identifier: BSD-3-Clause
"""Float32 parameters whose Adam state is bfloat16, on a GPU that the CPU plays: PyTorch's fused
kernel takes these from 2.12 on, and other implementations refuse them."""

import functools
import itertools

import gpu
import pytest
import torch
from common import Fused, adamw, assert_same, refused
from gpu import NAME, captured
from legal import backward, in_order, legal, net, to_host, train, training
from mixed_state import NARROW, dtypes_of, entry_of, make_state, with_narrow_state
from test_gpu_trial import stock

import optfuse
from optfuse._library import releases
from optfuse._library.releases import release_of, takes_mixed

MODES = ("forward", "backward")
STEPS = 5
OPTIONS = {
    "adamw": {},
    "adam": {"decoupled_weight_decay": False, "weight_decay": 0},
    "l2": {"decoupled_weight_decay": False},
    "l2, maximize": {"decoupled_weight_decay": False, "maximize": True},
    "amsgrad": {"amsgrad": True},
    "amsgrad, l2, beta1 0": {
        "amsgrad": True, "decoupled_weight_decay": False, "betas": (0.0, 0.9)
    },
}  # fmt: skip
# Stock's 2.11 refuses the state, too.
taken = pytest.mark.skipif(
    not takes_mixed(release_of(torch.__version__)), reason="this torch takes no such state"
)
pytestmark = taken
_numbers = itertools.count(1)


def adam(parameters, **options):
    """As AdamW, or not."""
    kind = torch.optim.AdamW if options.pop("decoupled_weight_decay", True) else torch.optim.Adam
    return kind(parameters, **{"lr": 1e-2, "weight_decay": 1e-1, "fused": True, **options})


def narrowed(parameters, **options):
    return with_narrow_state(adam(parameters, **options))


def loop(options, iteration=train):
    def between(model, optimizer, i):
        if i != 1:  # once, the next step finds updates that nobody has used
            yield "weights", list(model.parameters())
            yield "dtypes", dtypes_of(optimizer)

    make = functools.partial(narrowed, **options)
    return training(make, iteration=iteration, between=between, steps=STEPS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_training_loop(options, mode):
    legal(loop(options), mode)


def test_these_kernels_update():
    model = net()
    optimizer = optfuse.fuse(with_narrow_state(adamw(model.parameters())))
    train(model, optimizer, 0)

    def work():
        train(model, optimizer, 1)
        optfuse.flush()

    names = gpu.kernels(work)
    assert "of_cuda_adam_mixed_float32_3_small" in names, names
    assert not any("adam_float32" in name for name in names), names


@pytest.mark.parametrize("when", ["before fuse", "after fuse"])
@in_order(*MODES)
def test_state_that_the_script_puts_there(wrap, when):
    model = net()
    optimizer = adamw(model.parameters())

    def put():
        for p in model.parameters():
            optimizer.state[p] = entry_of(p, False, step=3.0)

    if when == "before fuse":
        put()
    optimizer = wrap(optimizer)
    if when == "after fuse":
        put()
    for i in range(STEPS):
        train(model, optimizer, i)
    yield "weights", list(model.parameters())
    yield "state", optimizer.state_dict()["state"]


@pytest.mark.parametrize("apart", [True, False], ids=["group", "parameter"])
@in_order(*MODES)
def test_one_has_it_and_the_others_not(wrap, apart):
    """PyTorch wants a group of its own for it."""
    model = net()
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others}]
    if wrap.fused and not apart:
        groups = [{"params": [first, *others]}]
    optimizer = wrap(adamw(groups))
    optimizer.state[first] = entry_of(first, False)
    for i in range(STEPS):
        train(model, optimizer, i)
    yield "weights", list(model.parameters())
    yield "state", [optimizer.state[p] for p in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("narrow_again", [False, True])
def test_load_state_dict(mode, narrow_again):
    """PyTorch's gives state the parameter's dtype; a hook after it may narrow it again."""

    def narrow(optimizer):
        for entry in optimizer.state.values():
            entry.update({k: v.to(NARROW) for k, v in entry.items() if k != "step"})

    def between(model, optimizer, i):
        if i == 1:
            if narrow_again:
                optimizer.register_load_state_dict_post_hook(narrow)
            optimizer.load_state_dict(optimizer.state_dict())
        return dtypes_of(optimizer)

    legal(training(narrowed, between=between, steps=STEPS), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_learning_rate_on_the_device(mode):
    def iteration(model, optimizer, i):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * (i + 1), device=NAME)
        train(model, optimizer, i)

    legal(loop({}, iteration=iteration), mode)


def test_clipped_gradients():
    def iteration(model, optimizer, i):
        backward(model, optimizer, i)
        optfuse.clip_grad_norm_(optimizer, 0.05)
        optimizer.step()

    legal(loop({}, iteration=iteration))


# State that stock refuses


def step_of(optimizer, entry, dtype=torch.float32):
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.ones_like(p)
    optimizer.state[p] = entry(p)
    return p


HALF = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16,) * 2
NAMES = ("first", "second", "float16")


@pytest.mark.parametrize("dtypes", HALF, ids=NAMES)
def test_stock_refuses_other_state_and_so_do_we(dtypes):
    def made(wrap):
        optimizer = wrap(adamw([torch.ones(9, device=NAME, requires_grad=True)]))
        p = step_of(optimizer, lambda p: entry_of(p, False, dtypes=dtypes))
        return optimizer, p

    plain, _ = made(lambda optimizer: optimizer)
    with pytest.raises(RuntimeError):
        plain.step()
    fused, p = made(optfuse.fuse)
    refused(fused.step, "the optimizer state of", way_out="nothing was updated")
    assert fused.state[p]["step"].item() == 0 and p.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_parameters_of_other_dtypes(dtype):
    fused = optfuse.fuse(adamw([torch.ones(9, device=NAME, dtype=dtype, requires_grad=True)]))
    step_of(fused, lambda p: entry_of(p, False))
    refused(fused.step, "has another dtype", way_out="nothing was updated")


def test_a_release_that_does_not_take_it(monkeypatch):
    monkeypatch.setattr(releases, "TAKES_MIXED", "9.9")
    fused = optfuse.fuse(adamw([torch.ones(9, device=NAME, requires_grad=True)]))
    step_of(fused, lambda p: entry_of(p, False))
    refused(fused.step, "is bfloat16", "from release 2.12 on", way_out="in float32")


# The trial


def untried(**options):
    """With options that no trial has had; and its parameter, whose first step() has state."""
    options = {"weight_decay": 0.3 + next(_numbers) / 1024, **options}
    return adamw([torch.ones(9, device=NAME, requires_grad=True)], **options)


def flipped(params, *_):
    last = params[3][-1:]
    last.copy_(last.cpu().nextafter(torch.full((1,), torch.inf)))


def meet(optimizer):
    step_of(optimizer, lambda p: entry_of(p, False))
    optimizer.step()


KIND = "float32 with bfloat16 state on fakecuda:0"


def test_bits_are_compared_when_the_state_is_met():
    optimizer = optfuse.fuse(untried(), strict=True)
    with stock(torch.ops.aten._fused_adamw_.default) as calls:
        meet(optimizer)
        assert len(calls) == 3
        optimizer.step()
        assert len(calls) == 3
    assert optfuse.summary(optimizer).gpu_bits_differ == ()


def test_bits_are_compared_by_fuse_where_there_is_state():
    optimizer = untried()
    step_of(optimizer, lambda p: entry_of(p, False))
    with (
        stock(torch.ops.aten._fused_adamw_.default, then=flipped),
        pytest.raises(optfuse.Error, match=f"strict=True, but updates of {KIND}"),
    ):
        optfuse.fuse(optimizer, strict=True)


def test_another_bit_is_told_once():
    optimizer = optfuse.fuse(untried())
    with (
        stock(torch.ops.aten._fused_adamw_.default, then=flipped),
        pytest.warns(UserWarning, match=f"{KIND} round differently") as said,
    ):
        meet(optimizer)
    assert [one.filename for one in said] == [__file__]
    optimizer.step()
    assert f"{KIND} round differently" in str(optfuse.summary(optimizer))


def test_another_bit_is_refused_if_strict():
    optimizer = optfuse.fuse(untried(), strict=True)
    with stock(torch.ops.aten._fused_adamw_.default, then=flipped):
        refused(lambda: meet(optimizer), KIND, way_out="strict=False")
    (p,) = optimizer.param_groups[0]["params"]
    refused(optimizer.step, KIND, way_out="strict=False")  # known by now
    assert p.eq(1).all() and optimizer.state[p]["step"].item() == 0


def test_a_wrong_update_is_refused():
    optimizer = optfuse.fuse(untried())
    with stock(torch.ops.aten._fused_adamw_.default, lr=0.02):
        refused(lambda: meet(optimizer), "with BFloat16 state", way_out="far more than rounding")


def test_nothing_is_compared_inside_a_capture():
    optimizer = optfuse.fuse(untried())
    step_of(optimizer, lambda p: entry_of(p, False))
    with captured(torch.accelerator.current_stream()):
        refused(optimizer.step, "while a CUDA graph is captured", way_out="before the capture")
    optimizer.step()
    assert optfuse.summary(optimizer).created == 1


def test_state_without_a_step_on_the_device():
    """fused=True has the step on the GPU; without it PyTorch refuses the state, and the bits are
    still those of fused=True."""

    def trained(wrap, **options):
        torch.manual_seed(0)
        model = net()
        optimizer = wrap(adamw(model.parameters(), **options))
        for p in model.parameters():
            entry = entry_of(p, False)
            place = p.device if options["fused"] else "cpu"
            optimizer.state[p] = {**entry, "step": entry["step"].to(place)}
        for i in range(STEPS):
            train(model, optimizer, i)
        return to_host(list(model.parameters()))

    wanted = trained(lambda optimizer: optimizer, fused=True)
    assert_same("weights", trained(optfuse.fuse, fused=None), wanted)


def test_the_hook_finds_no_state_in_backward_mode():
    """Else the state would be float32, since backward would have made it."""
    wrap = Fused("backward")
    model = net()
    optimizer = wrap(with_narrow_state(adamw(model.parameters())))
    backward(model, optimizer, 0)
    assert not optimizer.state and all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    assert dtypes_of(optimizer)["exp_avg"] == {"torch.bfloat16"}
    backward(model, optimizer, 1)
    assert optfuse.summary(optimizer).created == 2 * len(list(model.parameters()))
    optimizer.step()
    assert make_state in optimizer._optimizer_step_pre_hooks.values()
