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
def test_options_that_select_an_implementation_without_scales_raise_as_in_stock(mode):
    model = net()
    optimizer = optfuse.fuse(torch.optim.Adam(model.parameters(), foreach=False), mode=mode)
    for i in range(4):
        optimizer.zero_grad()
        set_scale(optimizer, {"grad_scale": 4.0} if i == 2 else {})
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, i).backward()
        if i == 2:
            with pytest.raises(AssertionError):
                optimizer.step()
            assert all(map(torch.equal, model.parameters(), before))
            set_scale(optimizer, {})
        optimizer.step()
        assert not any(map(torch.equal, model.parameters(), before))


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
@pytest.mark.parametrize("is_late", (False, True))
def test_a_class_that_asserts_that_there_is_none_does(is_late, name, mode):
    model = net()
    optimizer = optfuse.fuse(torch.optim.Adafactor(model.parameters()), mode=mode)
    for i in range(3):
        optimizer.zero_grad()
        if i == 1 and not is_late:
            set_scale(optimizer, {name: 0.0})
        loss_of(model, i).backward()
        if i == 1:
            set_scale(optimizer, {name: 0.0})
            with pytest.raises(AssertionError, match="Grad scaling should occur outside"):
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
