# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: what a script changes between backward() and step(), after the update. A change
that stock's step() would obey raises and names the parameter; the update stands, and training goes
on. Any other is equal."""

import pytest
import style_classes
import torch
from common import (
    adamw,
    fused_backward,
    loss_of,
    net,
    one_process,
    refused,
    sgd,
    train,
)
from programs.deeds.late import STATES
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.optim import Adadelta, Adagrad

import optfuse

WRITES = ("value_of_zeros", "tensor_written", "counter_written")
LATE = "between backward() and step()"


def adagrad(parameters):
    return Adagrad(parameters, fused=True)


def first(optimizer):
    return optimizer.param_groups[0]["params"][0]


def entry_of(optimizer):
    return optimizer.state[first(optimizer)]


def begun(make, model=None, steps=2):
    """A model and its optimizer in backward mode, between backward() and step()."""
    model, optimizer = fused_backward(make, model)
    for i in range(steps):
        train(model, optimizer, i)
    optimizer.zero_grad()
    loss_of(model, steps).backward()
    return model, optimizer


def goes_on(model, optimizer):
    """After the error: step() confirms what backward() did, and training goes on."""
    optimizer.step()
    for i in range(2):
        model.zero_grad()  # also parameters that have left the optimizer
        train(model, optimizer, i)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("make", (adamw, sgd, adagrad, Adadelta))
@pytest.mark.parametrize(
    "change", ("popped", "value_of_zeros", "tensor_written", "counter_written")
)
def test_late_changes_of_state_in_other_dtypes(change, make, dtype):
    p = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = optfuse.fuse(make([p]), mode="backward")
    for i in range(3):
        optimizer.zero_grad()
        p.square().sum().backward()
        if i == 2 and not (change == "counter_written" and make is sgd):
            STATES[change](optimizer, p)
            refused(optimizer.step, LATE, "of parameter 0 of group 0")
        optimizer.step()


def test_a_late_scale_beside_a_gradient_that_is_left_to_step():
    """The gradient's update would obey the scale, where the others have not."""
    model, held = net(), []
    last = list(model.parameters())[-1]
    last.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    loss_of(model, 0).backward()
    optimizer.grad_scale = torch.tensor(2.0)
    for _ in range(2):
        refused(optimizer.step, "Set both to None and call step()")
    optimizer.grad_scale = None
    goes_on(model, optimizer)


def test_the_error_counts_the_changes_and_each_is_said_once():
    model, optimizer = begun(adamw)
    optimizer.param_groups[0]["lr"] *= 0.5
    refused(optimizer.step, f"one of {len(list(model.parameters()))} such changes")
    entry_of(optimizer)["exp_avg"].zero_()
    refused(optimizer.step, "the state of parameter 0 of group 0")
    goes_on(model, optimizer)


def test_a_change_between_two_passes_of_a_step():
    one, two = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = optfuse.fuse(adamw([one, two]), mode="backward")
    for _ in range(2):
        optimizer.zero_grad()
        (one.square().sum() + two.sum()).backward()
        optimizer.step()
    optimizer.zero_grad()
    one.square().sum().backward()
    optimizer.state[one]["exp_avg"].zero_()
    refused(two.sum().backward, LATE, "the state of parameter 0 of group 0")
    refused(optimizer.step, LATE, "the state of parameter 0 of group 0")
    optimizer.step()


def weight_of_dtensor(optimizer):
    first(optimizer).mul_(0.5)


def state_of_dtensor(optimizer):
    entry_of(optimizer)["exp_avg"].zero_()


def local_state_of_dtensor(optimizer):
    entry_of(optimizer)["exp_avg"].to_local().zero_()


@pytest.mark.parametrize("write", (weight_of_dtensor, state_of_dtensor, local_state_of_dtensor))
def test_late_writes_to_dtensors(write):
    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        # distribute_tensor() sends a message; gloo's thread has the memory for a while after it.
        p = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False))
        optimizer = optfuse.fuse(adamw([p]), mode="backward")
        for i in range(3):
            optimizer.zero_grad()
            p.square().to_local().sum().backward()
            if i == 2:
                with torch.no_grad():
                    write(optimizer)
                refused(optimizer.step, LATE, "was written in place")
            optimizer.step()


# Changes that are equal


@pytest.mark.parametrize("note", (1, None, object()), ids=("a number", "None", "an object"))
def test_a_note_in_the_state_of_a_recorded_class_is_refused(note):
    """Its step() could read the key."""
    model = net()
    optimizer = optfuse.fuse(style_classes.AdaBelief(model.parameters()), mode="backward")
    for i in range(5):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i == 3:
            for entry in optimizer.state.values():
                entry["a note"] = note
            refused(optimizer.step, "state['a note']", "was added", way_out="after step()")
        optimizer.step()
