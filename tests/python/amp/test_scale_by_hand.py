# SPDX-License-Identifier: BSD-3-Clause
"""optimizer.grad_scale and found_inf, set by a script: on the CPU fused=True divides the gradients
or leaves out the step, and so does a fused optimizer."""

import pytest
import torch
from common import everything, loss_of, net, same
from scripts import trained

import optfuse

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
CLASSES = {
    "SGD": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, **kw),
    "SGD with momentum": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, momentum=0.9, **kw),
    "Adam": lambda ps, **kw: torch.optim.Adam(ps, lr=0.1, **kw),
    "AdamW": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, **kw),
    "Adagrad": lambda ps, **kw: torch.optim.Adagrad(ps, lr=0.1, **kw),
}
every_class = pytest.mark.parametrize("name", CLASSES)
#: Attributes that are set in each iteration; None: none.
SCALES = {
    "scale": [{"grad_scale": 8.0}] * 4,
    "overflow": [{}, {"found_inf": 1.0}, {"found_inf": 0.0}, {}],
    "both": [{"grad_scale": 3.0, "found_inf": float(i == 2)} for i in range(4)],
    "now and then": [{}, {"grad_scale": 0.1}, {}, {"grad_scale": 2.0, "found_inf": 1.0}, {}],
}


def set_scale(optimizer, scales):
    for name in ("grad_scale", "found_inf"):
        setattr(optimizer, name, torch.tensor(scales[name]) if name in scales else None)


def scaled(make, iterations, before_backward=True, zeroes=True):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters(), fused=True))
        for i, scales in enumerate(iterations):
            if zeroes:
                optimizer.zero_grad()
            if before_backward:
                set_scale(optimizer, scales)
            loss_of(model, i).backward()
            set_scale(optimizer, scales)
            optimizer.step()
            if scales:
                yield "gradients", [p.grad for p in model.parameters()]
            yield from everything(model, optimizer)

    return script


@both_modes
@every_class
@pytest.mark.parametrize("scales", SCALES)
def test_a_scale_that_is_set_before_backward_is_obeyed(scales, name, mode):
    same(scaled(CLASSES[name], SCALES[scales]), mode, prove={} in SCALES[scales])


@every_class
@pytest.mark.parametrize("scales", SCALES)
def test_forward_mode_obeys_one_that_is_set_before_step(scales, name):
    script = scaled(CLASSES[name], SCALES[scales], before_backward=False, zeroes=False)
    same(script, prove={} in SCALES[scales])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
@both_modes
def test_an_overflow_in_the_first_step_leaves_new_state(name, mode):
    """SGD's buffer has no numbers then, in stock."""
    same(scaled(CLASSES[name], [{"found_inf": 1.0}, {"grad_scale": 2.0}, {}]), mode)


@both_modes
def test_summary_counts_such_steps(mode):
    model = net()
    optimizer = optfuse.fuse(CLASSES["Adam"](model.parameters(), fused=True), mode=mode)
    for i in range(4):
        set_scale(optimizer, {"grad_scale": 4.0} if i else {})
        optimizer.zero_grad()
        loss_of(model, i).backward()
        assert ("by hand" in str(optfuse.summary(optimizer))) == (i > 1)
        optimizer.step()
    summary = optfuse.summary(optimizer)
    assert summary.scaled_steps == 3 and "3 steps were those of PyTorch" in str(summary)


@both_modes
def test_options_that_select_another_implementation_stay(mode):
    """Stock raises an AssertionError where it would take one that knows no scale."""

    def script(wrap):
        model = net()
        flags = {} if wrap.fused else {"fused": True}
        optimizer = wrap(torch.optim.Adam(model.parameters(), **flags))
        set_scale(optimizer, {"grad_scale": 4.0})
        for i in range(3):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            assert optimizer.param_groups[0]["fused"] is (None if wrap.fused else True)
            yield "weights", list(model.parameters())

    same(script, mode, prove=False)


@both_modes
@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.NAdam])
def test_a_class_that_reads_none_ignores_one(make, mode):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        set_scale(optimizer, {"grad_scale": 8.0, "found_inf": 1.0})
        loss_of(model, i).backward()
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(lambda p: make(p, foreach=False), iteration=iteration), mode)


def with_holes(p):
    return torch.ones(*p.shape, 2, dtype=p.dtype)[..., 0]


def exchange_gradient(optimizer, p):
    p.grad = with_holes(p)


def expand_gradient(optimizer, p):
    p.grad = torch.ones((), dtype=p.dtype).expand(p.shape)


def turn_gradient(optimizer, p):
    p.grad = torch.ones(p.shape[::-1], dtype=p.dtype).t()


def exchange_parameter(optimizer, p):
    wide = with_holes(p)
    wide.copy_(p.detach())
    p.data = wide
    p.grad = torch.ones_like(p)


def exchange_state(optimizer, p):
    optimizer.state[p]["exp_avg"] = with_holes(p)


@both_modes
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("scales", ({"grad_scale": 8.0}, {"found_inf": 0.0}), ids=str)
@pytest.mark.parametrize(
    "change",
    (exchange_gradient, expand_gradient, turn_gradient, exchange_parameter, exchange_state),
)
def test_strides_that_the_kernel_would_ignore_are_refused(change, scales, dtype, mode):
    """Stock takes the wrong elements, or writes past the end of the memory."""
    p, q = (torch.nn.Parameter(torch.ones(5, 4, dtype=dtype)) for _ in range(2))
    optimizer = optfuse.fuse(CLASSES["AdamW"]([q, p], fused=True), mode=mode)
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        optimizer.zero_grad()
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    change(optimizer, p)
    set_scale(optimizer, scales)
    before = [p.detach().clone(), q.detach().clone(), p.grad.clone()]
    with pytest.raises(optfuse.Error, match="parameter 1 of group 0.*has holes or other strides"):
        optimizer.step()
    assert all(map(torch.equal, [p.detach(), q.detach(), p.grad], before))
    set_scale(optimizer, {})
    optimizer.step()
    assert (p != before[0]).any() and (q != before[1]).any()


def test_channels_last_are_like_each_other():
    def script(wrap):
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = wrap(CLASSES["AdamW"](model.parameters(), fused=True))
        for _ in range(3):
            set_scale(optimizer, {"grad_scale": 2.0})
            optimizer.zero_grad()
            model(torch.ones(1, 3, 4, 4)).square().sum().backward()
            optimizer.step()
            yield from everything(model, optimizer)

    same(script, prove=False)


@both_modes
@pytest.mark.parametrize("name", ("grad_scale", "found_inf"))
def test_a_class_that_asserts_that_there_is_none_raises(name, mode):
    model = net()
    optimizer = optfuse.fuse(torch.optim.Adafactor(model.parameters()), mode=mode)
    for i in range(3):
        set_scale(optimizer, {name: 0.0} if i == 1 else {})
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i == 1:
            raised, said = AssertionError, "Grad scaling should occur outside"  # stock's
            if mode == "backward":
                raised, said = optfuse.Error, "Adafactor takes no grad_scale"
            with pytest.raises(raised, match=said):
                optimizer.step()
            set_scale(optimizer, {})
        optimizer.step()


def test_accumulated_passes_are_counted_after_such_a_step():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        set_scale(optimizer, {"grad_scale": 2.0} if i == 1 else {})
        for part in range(2):
            loss_of(model, 2 * i + part).backward()
        optimizer.step()
        yield from everything(model, optimizer)

    same(
        trained(lambda p: CLASSES["AdamW"](p, fused=True), iteration=iteration),
        "backward",
        accumulate=2,
    )


def test_a_scale_and_a_delay():
    model = net()
    optimizer = optfuse.fuse(
        CLASSES["SGD"](model.parameters(), fused=True),
        optfuse.Forward(delay={model[0].weight: 1}),
    )
    before = model[0].weight.detach().clone()
    set_scale(optimizer, {"grad_scale": 1e30})
    loss_of(model, 0).backward()
    optimizer.step()
    optfuse.drain(optimizer)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad.abs().max() < 1e-20
