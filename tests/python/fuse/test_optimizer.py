# SPDX-License-Identifier: BSD-3-Clause
"""A fused optimizer stays a torch.optim optimizer: groups, schedulers,
state, copies. Where both modes promise it, both are tested."""

import ctypes
from xml.etree import ElementTree

import pytest
import torch
from common import adamw, loss_of, net, python_ok, refused, train
from torch import nn

import optfuse

STEPS = 6
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


def test_the_same_object_with_the_same_face_comes_back():
    stock = torch.optim.AdamW
    optimizer = adamw(net().parameters())
    groups, defaults, state = optimizer.param_groups, optimizer.defaults, optimizer.state
    fused = optfuse.fuse(optimizer)
    assert fused is optimizer
    assert isinstance(fused, stock) and type(fused).__name__ == "AdamW"
    assert fused.param_groups is groups and fused.defaults is defaults and fused.state is state
    assert repr(fused) == repr(adamw(net().parameters()))


def test_a_step_that_raises_for_one_group_has_updated_none():
    """Stock has updated the groups before it."""

    def trained_until_it_raises(fused):
        first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
        groups = [{"params": [first]}, {"params": [second]}]
        optimizer = torch.optim.Adam(groups, lr=0.1, fused=True)
        if fused:
            optimizer = optfuse.fuse(optimizer)
        second.grad = torch.ones(4)
        optimizer.step()
        for group in optimizer.param_groups:
            group["amsgrad"] = True  # which the second's state is not made for
        first.grad, second.grad = torch.ones(4), torch.ones(4)
        with pytest.raises(KeyError, match="max_exp_avg_sq"):
            optimizer.step()
        raised = first.detach().clone()
        for group in optimizer.param_groups:
            group["amsgrad"] = False
        optimizer.step()
        return raised, first.detach().clone(), second.detach().clone()

    stock, ours = trained_until_it_raises(False), trained_until_it_raises(True)
    assert not torch.equal(stock[0], torch.ones(4))
    assert torch.equal(ours[0], torch.ones(4))
    assert torch.equal(ours[2], stock[2]), "the group that raised goes on alike"
    assert not torch.equal(ours[1], ours[0]), "and the other one is updated then"


def test_backward_raises_where_state_lacks_what_an_option_asks_for():
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(torch.optim.Adam([p], fused=True), optfuse.Backward())
    p.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = p.detach().clone()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(optfuse.Error, match="KeyError.*max_exp_avg_sq"):
        p.sum().backward()
    assert torch.equal(p, before)


@both_modes
@pytest.mark.parametrize("names", [("exp_avg", "exp_avg_sq"), ("exp_avg",), ("exp_avg_sq",)])
def test_bfloat16_state_of_a_float32_parameter(names, mode):
    """PyTorch refuses it on the CPU."""

    def attempt(wrap):
        p = torch.ones(9, requires_grad=True, device="cpu")
        optimizer = wrap(adamw([p]))
        entry = {key: torch.zeros(9, device="cpu") for key in ("exp_avg", "exp_avg_sq")}
        entry |= {key: entry[key].bfloat16() for key in names}
        optimizer.state[p] = {"step": torch.tensor(0.0, device="cpu"), **entry}
        return p, entry, lambda: (p.sum().backward(), optimizer.step())

    with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
        attempt(lambda optimizer: optimizer)[-1]()
    p, entry, step = attempt(lambda optimizer: optfuse.fuse(optimizer, mode))
    refused(step, "is bfloat16", "on a GPU only", way_out="create it in float32")
    assert p.eq(1).all() and not any(value.any() for value in entry.values())


# State in and out, at any moment


# Copies


def test_a_pickled_optimizer_loads_where_optfuse_is_missing(tmp_path):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    torch.save((list(model.parameters()), optimizer), tmp_path / "both.pt")
    out = python_ok(
        "import sys; sys.modules['optfuse'] = None\n"
        "import torch\n"
        f"params, opt = torch.load({str(tmp_path / 'both.pt')!r}, weights_only=False)\n"
        "assert type(opt) is torch.optim.AdamW and opt.param_groups[0]['params'][0] is params[0]\n"
        "print(opt.state[params[0]]['step'].item(), params[0].sum().item())\n"
    )
    assert out.split() == ["1.0", str(model[0].weight.sum().item())]


def test_summary_and_flush():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    n = len(list(model.parameters()))
    train(model, optimizer, 0)
    before = optfuse.summary(optimizer)
    assert (before.created, before.pending) == (n, n), str(before)
    optfuse.flush(optimizer)
    after = optfuse.summary(optimizer)
    assert (after.created, after.pending, after.in_step) == (n, 0, 0), str(after)
    assert f"{n} created" in str(after) and "AdamW" in str(after)
    page = ElementTree.fromstring(f"<div>{after._repr_html_()}</div>")
    assert " ".join(page.itertext()).split() == str(after).split()
    train(model, optimizer, 1)
    optfuse.flush()
    assert optfuse.summary(optimizer).pending == 0


def test_eager_parameters_are_never_left_pending():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), eager=[model[0].weight])
    address = model[0].weight.data_ptr()
    before = ctypes.string_at(address, 48)
    train(model, optimizer, 0)
    assert ctypes.string_at(address, 48) != before, "the raw address still shows the old weight"
    assert optfuse.summary(optimizer).pending == len(list(model.parameters())) - 1


def test_hooks_of_ours_leave_no_update_to_step():
    model = net()
    reordering = optfuse.reorder(model, "last")
    optimizer = optfuse.fuse(adamw(model.parameters()), "backward")
    loss_of(model, 0).backward()
    assert optfuse.summary(optimizer).created == len(list(model.parameters()))
    optimizer.step()
    reordering.remove()
