# SPDX-License-Identifier: BSD-3-Clause
"""Gradients, parameters and state of unusual kinds: the numbers of stock, or a
refusal that changes nothing."""

import pytest
import torch
from common import adamw, assert_same, same, sgd, snapshot
from torch import nn

import optfuse

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


def negated(values):
    return torch._neg_view(values)


@both_modes
def test_a_lazily_negated_gradient_has_its_sign(mode):
    """Stock's fused kernels refuse such a gradient; its for-loop resolves it."""

    def script(wrap):
        a, b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
        optimizer = wrap(torch.optim.SGD([a, b], lr=0.1, foreach=False))
        for _ in range(3):
            optimizer.zero_grad()
            (torch.complex(a, b).conj() * (1 + 3j)).real.backward()
            optimizer.step()
        yield "weights", [a.detach(), b.detach()]

    same(script, mode=mode)


def test_a_lazily_negated_gradient_set_by_hand():
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(torch.optim.SGD([p], lr=0.5))
    p.grad = negated(torch.ones(4))
    optimizer.step()
    assert p.tolist() == [1.5] * 4


def test_a_lazy_zero_gradient_is_zero():
    def script(wrap):
        p = nn.Parameter(torch.ones(4))
        optimizer = wrap(torch.optim.SGD([p], lr=0.5, momentum=0.9, foreach=False))
        for grad in (torch.ones(4), torch._efficientzerotensor(4)):
            p.grad = grad
            optimizer.step()
        yield "weights", p.detach()

    same(script)


def lazy_parameter():
    p = nn.Parameter(torch.ones(4))
    p.data = negated(torch.ones(4))
    return p


def expanded_parameter():
    return nn.Parameter(torch.ones(1).expand(4))


@pytest.mark.parametrize("make", (lazy_parameter, expanded_parameter))
def test_parameters_without_memory_of_their_own_are_refused(make):
    p = make()
    optimizer = optfuse.fuse(sgd([p]))
    before = snapshot(p.detach())
    p.grad = torch.ones(4)
    with pytest.raises(optfuse.Error, match=r"param\.data\.(resolve_neg|clone)\(\)"):
        optimizer.step()
    assert_same("the parameter", p.detach(), before)


STATES = {
    "negated": (negated, r"resolve_neg\(\)"),
    "expanded": (lambda t: t[:1].expand(4), r"clone\(\)"),
    "of another dtype": (lambda t: t.double(), "dtype"),
    "of another shape": (lambda t: t[:3], "shape"),
    "sparse": (lambda t: t.to_sparse(), "layout"),
}


@both_modes
@pytest.mark.parametrize("kind", STATES)
def test_state_that_can_not_be_updated_is_refused(kind, mode):
    change, words = STATES[kind]
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(sgd([p]), mode=mode)
    p.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    buffer = optimizer.state[p]["momentum_buffer"]
    optimizer.state[p]["momentum_buffer"] = change(buffer)
    before = snapshot(p.detach())

    def train():
        p.sum().backward()
        optimizer.step()

    with pytest.raises(optfuse.Error, match=words):
        train()
    assert_same("the parameter", p.detach(), before)
    optimizer.state[p]["momentum_buffer"] = buffer
    optimizer.zero_grad()
    train()


@both_modes
def test_a_model_moved_after_fusing_is_refused(mode):
    """Where PyTorch exchanges tensors in place; else it makes new parameters,
    which the optimizer doesn't know, as in stock."""
    model = nn.Linear(3, 2)
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

    def train():
        model(torch.ones(1, 3, device="meta")).sum().backward()
        optimizer.step()

    with pytest.raises(optfuse.Error, match="moved to meta"):
        train()


@both_modes
def test_a_model_cast_after_fusing_trains_on(mode):
    """State of the old dtype is refused; new state is made in the new one."""

    def script(wrap):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = wrap(sgd(model.parameters()))
        model.double()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3, dtype=torch.double)).sum().backward()
            optimizer.step()
        yield "weights", dict(model.state_dict())

    same(script, mode=mode)


def test_steps_under_inference_mode_and_outside_of_it():
    """Stock makes state there that can be updated only there."""

    def script(wrap):
        p = nn.Parameter(torch.ones(4))
        optimizer = wrap(adamw([p]))
        for _ in range(3):
            p.grad = torch.ones(4)
            with torch.inference_mode():
                optimizer.step()
        yield "weights", p.detach()

    same(script, prove=False)
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(adamw([p]))
    p.grad = torch.ones(4)
    with torch.inference_mode():
        optimizer.step()
    with pytest.raises(optfuse.Error, match="inference_mode"):
        optimizer.step()


def test_two_optimizers_whose_state_is_shared():
    """load_state_dict() doesn't copy: one's pending update is on the other's state."""
    for options in ({}, {"eager": True}):

        def script(wrap, options=options):
            torch.manual_seed(0)
            a, b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
            first = adamw([a])
            a.grad = torch.randn(8)
            first.step()
            second = adamw([b])
            second.load_state_dict(first.state_dict())
            wrap(first)
            wrap(second, **({"eager": [b]} if options else {}))
            for _ in range(4):
                a.grad, b.grad = torch.randn(8), torch.randn(8)
                first.step()
                second.step()
            yield "weights", [a.detach(), b.detach()]

        same(script)


@both_modes
def test_loading_state_that_lacks_what_new_options_need(mode):
    """amsgrad=True arrives with load_state_dict(), its buffer does not exist yet."""
    p = nn.Parameter(torch.ones(8))
    optimizer = optfuse.fuse(adamw([p]), mode=mode)
    p.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(adamw([nn.Parameter(torch.ones(8))], amsgrad=True).state_dict())
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    assert "max_exp_avg_sq" in optimizer.state[p]


def test_a_group_that_fails_to_be_added_leaves_the_others_working():
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(sgd([a]))
        if wrap.fused:
            with pytest.raises(ValueError, match="oops"):
                optimizer.add_param_group({"params": [b], "lr": "oops"})
            assert len(optimizer.param_groups) == 1
        for _ in range(2):
            a.grad = torch.ones(2)
            optimizer.step()
        yield "weights", a.detach()

    same(script)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize(
    "option, value, words",
    (
        ("lr", "fast", "option 'lr' of a parameter group is 'fast', and must be a number"),
        ("eps", None, "option 'eps' of a parameter group is None, and must be a number"),
        ("betas", (0.9,), "option 'betas' of a parameter group is (0.9,), and must be 2 numbers"),
        ("betas", None, "option 'betas' of a parameter group is None, and must be 2 numbers"),
        ("lr", ..., "option 'lr' of a parameter group is missing, and must be a number"),
    ),
)
def test_an_option_that_is_no_number_is_named(option, value, words, mode):
    p = nn.Parameter(torch.ones(2))
    optimizer = optfuse.fuse(adamw([p]), mode=mode)
    group = optimizer.param_groups[0]
    group[option] = value
    if value is ...:
        del group[option]
    with pytest.raises((TypeError, ValueError, LookupError, optfuse.Error)) as caught:
        p.sum().backward()
        optimizer.step()
    assert words in str(caught.value)
    assert (p == 1).all()


def test_bad_state_is_named_also_where_two_groups_look_alike():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optfuse.fuse(adamw([{"params": [a]}, {"params": [b]}]))
    (a + b).sum().backward()
    optimizer.step()
    optimizer.state[b]["step"] = 5
    with pytest.raises(optfuse.Error, match="parameter 0 of group 1"):
        optimizer.step()


def test_a_failed_fuse_keeps_nothing():
    """In backward mode it fails late: the parameter already has an owner."""
    p = nn.Parameter(torch.ones(2))
    keep = optfuse.fuse(sgd([p]), mode="backward")
    from optfuse._link import links

    n = len(links)
    second = sgd([p])
    with pytest.raises(optfuse.Error, match="already"):
        optfuse.fuse(second, mode="backward")
    assert len(links) == n and type(second) is torch.optim.SGD
    optfuse.unfuse(keep)
    optfuse.fuse(second, mode="backward")
