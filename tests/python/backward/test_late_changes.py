# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: what a script changes between backward() and step(), after the update. A change
that stock's step() would obey raises and names the parameter; the update stands, and training goes
on. Any other is equal."""

import collections
import contextlib
import copy

import numpy
import pytest
import style_classes
import torch
from common import (
    adamw,
    assert_same,
    everything,
    fused_backward,
    loss_of,
    net,
    one_process,
    refused,
    same,
    sgd,
    snapshot,
    train,
    weights,
)
from own_classes import NewTensors, Numbers, Tensors
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, RMSprop, Rprop

import optfuse

STEPS = 5
LATE = "between backward() and step()"


@pytest.fixture(scope="module", autouse=True)
def registered():
    for cls in (Tensors, Numbers, NewTensors):
        optfuse.register(cls)


def adagrad(parameters):
    return Adagrad(parameters, fused=True)


MAKERS = {
    "kernel with a counter": adamw,
    "kernel without": sgd,
    "kernel of the for-loop": RMSprop,
    "torch's operators": Adafactor,
    "own step()": Tensors,
    "own step(), numbers": Numbers,
    "own step(), new tensors": NewTensors,
    "recorded, a number counts": style_classes.AdaBelief,
    "recorded, a tensor counts": style_classes.TensorCounter,
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def first(optimizer):
    return optimizer.param_groups[0]["params"][0]


def entry_of(optimizer):
    return optimizer.__dict__["state"][first(optimizer)]


def tensors_of(optimizer):
    return [x for x in entry_of(optimizer).values() if isinstance(x, torch.Tensor)]


def another_rate(optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5
    return "the option 'lr' of parameter 0 of group 0"


def replaced_parameter(optimizer):
    """As 3D Gaussian splatting densifies."""
    old = first(optimizer)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(old.detach().clone())
    return "parameter 0 of group 0"


def removed_parameter(optimizer):
    del optimizer.param_groups[0]["params"][0]
    return "parameter 0 of group 0"


def no_parameters(optimizer):
    optimizer.param_groups[0]["params"] = []
    return "parameter 0 of group 0"


def moved_parameter(optimizer):
    groups = optimizer.param_groups
    groups.append({**groups[0], "lr": 0.5, "params": [groups[0]["params"].pop(0)]})
    return "parameter 0 of group 0"


def no_state(optimizer):
    optimizer.state.clear()
    return "of parameter 0 of group 0"


def another_state(optimizer):
    optimizer.state = collections.defaultdict(dict)
    return "of parameter 0 of group 0"


def state_by_dict(optimizer):
    optimizer.__dict__.update(state=collections.defaultdict(dict))
    return "of parameter 0 of group 0"


def no_entry(optimizer):
    del optimizer.state[first(optimizer)]
    return "of parameter 0 of group 0"


def empty_entry(optimizer):
    entry_of(optimizer).clear()
    return "of parameter 0 of group 0"


def no_value(optimizer):
    key, _ = entry_of(optimizer).popitem()
    return f"state[{key!r}] of parameter 0 of group 0"


def every_value_replaced(optimizer):
    entry = entry_of(optimizer)
    for key, value in entry.items():
        entry[key] = value * 0
    return "] of parameter 0 of group 0"


def last_value_replaced(optimizer):
    key, value = list(entry_of(optimizer).items())[-1]
    entry_of(optimizer)[key] = value * 0
    return f"state[{key!r}] of parameter 0 of group 0"


def tensor_written(optimizer):
    tensors = tensors_of(optimizer)
    if not tensors:
        pytest.skip("it has no tensors in its state")
    tensors[-1].zero_()
    return "the state of parameter 0 of group 0"


def counter_written(optimizer):
    counters = [x for x in tensors_of(optimizer) if not x.dim()]
    if not counters:
        pytest.skip("it has no counter that is a tensor")
    counters[0].fill_(7)
    return "the state of parameter 0 of group 0"


def weight_written(optimizer):
    with torch.no_grad():
        first(optimizer).mul_(0.5)
    return "parameter 0 of group 0"


CHANGES = (
    another_rate,
    replaced_parameter,
    removed_parameter,
    no_parameters,
    moved_parameter,
    no_state,
    another_state,
    state_by_dict,
    no_entry,
    empty_entry,
    no_value,
    every_value_replaced,
    last_value_replaced,
    tensor_written,
    counter_written,
    weight_written,
)


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


@every_maker
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_late_change_is_refused_and_training_goes_on(make, change):
    model, optimizer = begun(make)
    of = change(optimizer)
    updated = weights(model)
    message = refused(optimizer.step, LATE, "after step()", "The update stands")
    if make in (style_classes.AdaBelief, style_classes.TensorCounter) and "params" in message:
        of = "param_groups"  # its counters advance together
    assert of in message, message
    assert_same("weights after the error", weights(model), updated)
    if change is not no_value:  # with which no class goes on
        goes_on(model, optimizer)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_late_change_in_the_first_iteration(change):
    """The state was made inside backward."""
    model, optimizer = begun(adamw, steps=0)
    of = change(optimizer)
    refused(optimizer.step, LATE, of)
    if change is not no_value:
        goes_on(model, optimizer)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("make", (adamw, sgd, adagrad, Adadelta))
@pytest.mark.parametrize("change", (no_entry, last_value_replaced, tensor_written, counter_written))
def test_late_changes_of_state_in_other_dtypes(change, make, dtype):
    p = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = optfuse.fuse(make([p]), mode="backward")
    for _ in range(2):
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    p.square().sum().backward()
    refused_in = change(optimizer)
    refused(optimizer.step, LATE, refused_in)
    optimizer.step()


@pytest.mark.parametrize("name", ("grad_scale", "found_inf"))
@pytest.mark.parametrize("make", (SGD, Adam, AdamW, Adagrad))
def test_what_a_grad_scaler_hands_over_late_is_refused(make, name):
    model, optimizer = begun(lambda parameters: make(parameters, fused=True))
    setattr(optimizer, name, torch.tensor(1.0))
    refused(optimizer.step, LATE, name)
    delattr(optimizer, name)
    goes_on(model, optimizer)


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


@pytest.mark.parametrize("make", (RMSprop, Rprop, Adadelta))
def test_classes_that_do_not_read_them_ignore_them(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        yield from everything(model, optimizer)

    same(script, "backward")


class Scaled(Tensors):
    """Reads an attribute."""

    scale = 1.0

    def update(self, group, p, state):
        p.add_(p.grad, alpha=-group["lr"] * self.scale)


def test_an_attribute_of_a_registered_class():
    optfuse.register(Scaled)
    model, optimizer = begun(Scaled)
    optimizer.scale = 100
    refused(optimizer.step, LATE, "'scale'")
    goes_on(model, optimizer)


class ByName(Tensors):
    """Reads an option and an attribute by names that are made at run time."""

    def update(self, group, p, state):
        rates = dict(group.items())
        p.add_(p.grad, alpha=-rates["l" + "r"] * getattr(self, "fact" + "or", 1.0))


@pytest.mark.parametrize("is_option", (False, True))
@pytest.mark.parametrize("make", (Tensors, style_classes.AdaBelief))
def test_notes_of_a_script_are_nobodys_business(make, is_option):
    """Names that the class's code does not have."""

    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            if is_option:
                optimizer.param_groups[0]["last_loss"] = loss.item()
            else:
                optimizer.last_loss = loss.item()
            optimizer.step()
        yield "parameters", weights(model)

    same(script, "backward")


@pytest.mark.parametrize("is_option", (False, True))
def test_names_that_its_code_may_make_are_its_own(is_option):
    optfuse.register(ByName)
    model, optimizer = begun(ByName)
    if is_option:
        optimizer.param_groups[0]["factor"] = 2.0
    else:
        optimizer.factor = 2.0
    refused(optimizer.step, LATE, "'factor'")
    goes_on(model, optimizer)


def test_options_that_only_torchs_code_reads():
    """A subclass of PyTorch's."""

    class Own(RMSprop):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)

    optfuse.register(Own)
    model, optimizer = begun(Own)
    optimizer.param_groups[0]["alpha"] = 0.5
    refused(optimizer.step, LATE, "'alpha'")
    goes_on(model, optimizer)


def test_the_error_counts_the_changes_and_each_is_said_once():
    model, optimizer = begun(adamw)
    another_rate(optimizer)
    refused(optimizer.step, f"one of {len(list(model.parameters()))} such changes")
    tensor_written(optimizer)
    refused(optimizer.step, "the state of parameter 0 of group 0")
    goes_on(model, optimizer)


def test_a_change_before_the_groups_are_told_anew_is_kept():
    """add_param_group() tells the library of all parameters."""
    model, optimizer = begun(adamw)
    tensor_written(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    refused(optimizer.step, LATE, "the state of parameter 0 of group 0")
    goes_on(model, optimizer)


@every_maker
def test_a_change_after_the_groups_are_told_anew_is_seen(make):
    model, optimizer = begun(make)
    with contextlib.suppress(optfuse.Error):  # of a recorded class: nothing was added
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    of = every_value_replaced(optimizer)
    refused(optimizer.step, LATE, of)
    goes_on(model, optimizer)


def test_what_a_hook_of_the_optimizer_changes():
    model, optimizer = begun(adamw)
    handle = optimizer.register_step_pre_hook(lambda *_: another_rate(optimizer) and None)
    refused(optimizer.step, LATE, "'lr'")
    handle.remove()
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


def an_equal_rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = float(str(group["lr"]))


def groups_reversed(optimizer):
    optimizer.param_groups.reverse()


def lists_copied(optimizer):
    for group in optimizer.param_groups:
        group["params"] = list(group["params"])


def groups_copied(optimizer):
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def frozen(optimizer):
    first(optimizer).requires_grad_(False)


def thawed(optimizer):
    first(optimizer).requires_grad_(True)


def other_defaults(optimizer):
    optimizer.defaults["lr"] = 5.0


def state_copied(optimizer):
    optimizer.state = collections.defaultdict(dict, optimizer.state)


def entries_copied(optimizer):
    for p, entry in list(optimizer.state.items()):
        optimizer.state[p] = dict(entry)


def a_key_of_others(optimizer):
    for entry in optimizer.state.values():
        entry["a note"] = 1


EQUAL = {
    "an equal rate": (an_equal_rate, None),
    "groups in another order": (groups_reversed, None),
    "lists copied": (lists_copied, None),
    "groups copied": (groups_copied, None),
    "frozen": (frozen, thawed),
    "other defaults": (other_defaults, None),
    "state copied": (state_copied, None),
    "entries copied": (entries_copied, None),
    "a key of others": (a_key_of_others, None),
}


@pytest.mark.parametrize("name", EQUAL)
@every_maker
def test_what_step_would_not_see_is_equal(make, name):
    change, back = EQUAL[name]
    is_recorded = make in (style_classes.AdaBelief, style_classes.TensorCounter)
    if name == "groups in another order" and is_recorded:
        pytest.skip("refused: options are told by the place of their group")
    if name == "a key of others" and make not in (adamw, sgd, RMSprop):
        pytest.skip("refused: its step() could read the key")

    def script(wrap):
        model = net()
        groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2:].parameters()]}]
        optimizer = wrap(make(groups))
        for i in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            if i == 2:
                change(optimizer)
            optimizer.step()
            if back:
                back(optimizer)
        yield "parameters", dict(model.state_dict())
        yield "state", [optimizer.state[p] for p in model.parameters()]

    same(script, "backward", prove=make is not Numbers)


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


def test_a_group_added_late_is_trained_from_this_step_on():
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([a]))
        for i in range(STEPS):
            optimizer.zero_grad()
            b.grad = None if i < 2 else b.grad
            (a * b).sum().backward()
            if i == 2:
                optimizer.add_param_group({"params": [b], "lr": 0.5})
            optimizer.step()
            yield "weights", [a.detach(), b.detach()]

    same(script, "backward")


# Changes that stay different: writes that PyTorch does not see


def test_late_writes_past_the_versions_stay():
    """Through .data, NumPy and raw addresses: a row of docs/hazards.md."""
    model, optimizer = begun(adamw)
    entry_of(optimizer)["exp_avg"].data.zero_()
    entry_of(optimizer)["exp_avg_sq"].numpy()[:] = 0
    first(optimizer).data = torch.ones_like(first(optimizer))
    optimizer.step()
    assert not entry_of(optimizer)["exp_avg"].any() and not entry_of(optimizer)["exp_avg_sq"].any()
    assert numpy.array_equal(first(optimizer).detach().numpy(), numpy.ones((8, 6), numpy.float32))


# The order of the state


def is_used(i, number):
    """Whether parameter `number` gets a gradient in iteration i: the second later than others."""
    return number != 1 or i >= 2


def momentum(parameters):
    """Stock's fused SGD does not take a parameter whose first gradient comes later."""
    return SGD(parameters, momentum=0.9)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", [momentum if make is sgd else make for make in MAKERS.values()])
def test_state_is_in_the_order_of_the_parameters(make, mode):
    """Also of one whose first gradient comes later, and with each key in its place."""

    def script(wrap):
        params = [nn.Parameter(torch.full((3, 2), 1.0 + i)) for i in range(4)]
        optimizer = wrap(make([{"params": params[:2]}, {"params": params[2:]}]))
        for i in range(STEPS):
            optimizer.zero_grad()
            sum(p.square().sum() for n, p in enumerate(params) if is_used(i, n)).backward()
            optimizer.step()
            numbers = {p: n for n, p in enumerate(params)}
            yield "order", [numbers[p] for p in optimizer.state]
            yield "keys", [list(entry) for entry in optimizer.state.values()]
            yield "saved", list(optimizer.state_dict()["state"])
        yield "state", snapshot(copy.copy(optimizer.state_dict()))

    same(script, mode, prove=make not in (Numbers, NewTensors))
