# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: a gradient that was applied and freed is not "no gradient".
Stock would apply it again, so step() refuses instead of leaving it out."""

import copy

import pytest
import torch
from common import (
    adamw,
    assert_same,
    batch,
    everything,
    fused_backward,
    loss_of,
    net,
    refused,
    same,
    sgd,
    train,
    weights,
)
from scripts import trained
from torch import nn
from torch.distributed.tensor import DTensor, distribute_module, init_device_mesh

import optfuse

AGAIN = "zero_grad()"


def test_step_twice_after_one_backward_is_refused():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    before = weights(model)
    refused(optimizer.step, "already been applied", way_out=AGAIN)
    assert_same("weights after the refusal", weights(model), before)


def test_a_second_optimizer_in_forward_mode_finds_the_gradient_gone():
    p = nn.Parameter(torch.ones(3))
    first = optfuse.fuse(sgd([p]), mode="backward")
    second = optfuse.fuse(sgd([p]))
    p.sum().backward()
    first.step()
    refused(second.step, "already been applied", way_out=AGAIN)


def test_a_parameter_left_out_of_the_next_backward_without_zero_grad():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optfuse.fuse(sgd([a, b]), mode="backward")
    (a.sum() + b.sum()).backward()
    optimizer.step()
    a.grad = None
    a.sum().backward()
    refused(optimizer.step, "parameter 1 of group 0", way_out=AGAIN)


@pytest.mark.parametrize("set_to_none", (True, False))
def test_a_parameter_left_out_of_the_next_backward_after_zero_grad(set_to_none):
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([a, b]))
        for i in range(4):
            optimizer.zero_grad(set_to_none)
            (a.sum() * 2 + (b.sum() if i % 2 else 0)).backward()
            optimizer.step()
        yield "weights", [a.detach(), b.detach()]

    same(script, mode="backward")


MOVES = {
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "dtype and device": lambda model: model.to("cpu", torch.float64),
    "type": lambda model: model.type(torch.float64),
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "meta": lambda model: model.to("meta"),
}


@pytest.fixture(params=(False, True), ids=("data", "swapped"))
def swapping(request):
    """How Module.to() puts what it has converted into its parameters."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_model_has_consumed_gradients_there(move, swapping):
    ours, optimizer = fused_backward(sgd, convolutions())
    ours(torch.ones(1, 3, 6, 6)).sum().backward()
    optimizer.step()
    stock = copy.deepcopy(ours)
    for p in stock.parameters():
        p.grad = torch.ones_like(p)
    for model in (ours, stock):
        MOVES[move](model)
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        for what in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(p.grad, what) == getattr(q.grad, what)
        assert p.grad.stride() == q.grad.stride()
        refused(lambda p=p: p.grad.sum(), "already applied")
        refused(lambda p=p: p.grad.clone(), "already applied")
        refused(lambda p=p: p.grad.to(torch.float32).add_(1), "already applied")
    if move != "meta":
        x = torch.ones(1, 3, 6, 6).to(ours[0].weight)
        refused(lambda: ours(x).sum().backward(), "already applied")


@pytest.mark.parametrize("when", ("before step", "after step"))
def test_training_goes_on_after_a_model_was_cast_to_and_fro(when, swapping):
    def before_step(model, optimizer, i):
        if when == "before step":
            model.double().float()

    def between(model, optimizer, i):
        if when == "after step":
            model.double().float()

    same(
        trained(sgd, before_step=before_step, between=between), mode="backward", prove=not swapping
    )


def test_sharing_the_memory_of_consumed_gradients_names_the_way_out():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    refused(model.share_memory, "raw memory", way_out=AGAIN)
    optimizer.zero_grad()
    model.share_memory()


def test_the_two_losses_of_a_generative_adversarial_network():
    """The discriminator gets gradients of three losses, and those of the last are zeroed."""

    def script(wrap):
        generator, judge = net(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        of_generator, of_judge = (wrap(adamw(m.parameters())) for m in (generator, judge))
        for i in range(4):
            noise, real = batch(i)
            judge.zero_grad()
            with optfuse.accumulate(of_judge):
                judge(real).square().mean().backward()
            fake = generator(noise)
            (1 - judge(fake.detach())).square().mean().backward()
            of_judge.step()
            judge.zero_grad()
            generator.zero_grad()
            with optfuse.accumulate(of_judge):
                judge(fake).square().mean().backward()
            of_generator.step()
        yield from everything(judge, of_judge)
        yield from everything(generator, of_generator)

    same(script, mode="backward")


MARK = "with optfuse.accumulate(optimizer):"


def test_two_losses_that_are_not_marked_name_the_way_out():
    model, _optimizer = fused_backward()
    loss_of(model, 0).backward()
    refused(lambda: loss_of(model, 1).backward(), "already applied", way_out=MARK)
    model.zero_grad()
    refused(lambda: loss_of(model, 1).backward(), "second gradient", way_out=MARK)


def test_gradients_that_are_thrown_away_after_backward_name_the_way_out():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    refused(optimizer.zero_grad, "thrown away", way_out=MARK)
    model.zero_grad()
    refused(optimizer.step, "thrown away", way_out=MARK)


def test_groups_taken_away_are_noticed_before_an_update():
    """The library would use another group's learning rate."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}]
    optimizer = optfuse.fuse(torch.optim.SGD(groups), mode="backward")
    (a.sum() + b.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer.param_groups[0]
    refused((a.sum() + b.sum()).backward, "param_groups", way_out=AGAIN)
    assert (a.tolist(), b.tolist()) == ([0, 0], [0.5, 0.5])


def test_groups_taken_away_before_zero_grad():
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}]))
        for i in range(5):
            if i == 2:
                del optimizer.param_groups[0]
            if i == 4:
                optimizer.param_groups[0]["params"].append(a)
            for p in (a, b):
                p.grad = None
            optimizer.zero_grad()
            (a.sum() + b.sum()).backward()
            optimizer.step()
            yield "weights", [a.detach(), b.detach()]

    same(script, mode="backward")


def test_a_group_added_between_backward_and_step():
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([a]))
        for i in range(4):
            optimizer.zero_grad()
            (a * b).sum().backward()
            if i == 1:
                optimizer.add_param_group({"params": [b], "lr": 0.5})
            optimizer.step()
            b.grad = None
            yield "weights", [a.detach(), b.detach()]

    same(script, mode="backward")


def test_groups_changed_inside_backward_are_refused():
    model, optimizer = fused_backward()
    extra = nn.Parameter(torch.ones(2))
    seen = []

    def change(_):
        add = {"params": [extra]}
        seen.append(refused(lambda: optimizer.add_param_group(add), way_out="before"))
        seen.append(refused(lambda: optfuse.unfuse(optimizer), way_out="before"))

    model[0].weight.register_hook(change)
    loss_of(model, 0).backward()
    optimizer.step()
    assert len(seen) == 2 and len(optimizer.param_groups) == 1


def test_unfuse_leaves_no_consumed_gradient_behind():
    """A gradient that nobody can read any more is as after zero_grad(); the others stay."""
    model, optimizer = fused_backward()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    train(model, optimizer, 0)
    kept = model[0].weight.grad = torch.ones_like(model[0].weight)
    optfuse.unfuse(optimizer)
    gradients = [p.grad for p in model.parameters()]
    assert gradients[0] is kept and gradients[1:] == [None] * (len(gradients) - 1)
    assert all(p.grad is not None for p in other.parameters())
    before = weights(model)
    optimizer.step()  # stock's: of the gradient that is there
    changed = [name for name in before if not torch.equal(weights(model)[name], before[name])]
    assert changed == ["0.weight"]


def test_unfuse_before_step_leaves_gradients_at_which_stock_raises():
    """step() would count, and find nothing to do."""
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optfuse.unfuse(optimizer)
    assert all(p.grad is not None for p in model.parameters())
    refused(optimizer.step, way_out=AGAIN)
    optimizer.zero_grad()
    train(model, optimizer, 2)


def test_an_interrupt_inside_backward_stays_an_interrupt():
    model, optimizer = fused_backward()
    before = weights(model)

    class Interrupting(dict):
        def __getitem__(self, key):
            raise KeyboardInterrupt("here")

    optimizer.param_groups[0] = Interrupting(optimizer.param_groups[0])
    with pytest.raises(KeyboardInterrupt, match="here"):
        loss_of(model, 0).backward()
    assert_same("weights after the interrupt", weights(model), before)


def test_a_scaled_loss_is_noticed_inside_reentrant_checkpointing():
    from torch.utils.checkpoint import checkpoint

    block = nn.Linear(2, 1, bias=False)
    before = weights(block)
    optimizer = optfuse.fuse(sgd(block.parameters()), mode="backward")
    x = torch.ones(1, 2, requires_grad=True)
    loss = torch.amp.GradScaler("cpu").scale(checkpoint(block, x, use_reentrant=True).sum())
    refused(loss.backward, "GradScaler")
    assert_same("weights after the refusal", weights(block), before)
    # The failed backward's leftovers must not matter to the next one.
    optimizer.zero_grad()
    block(x).sum().backward()
    optimizer.step()
    assert optfuse.summary(optimizer).created == 1


def test_a_consumed_gradient_that_someone_keeps_is_not_used_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    kept = []
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        assert all(p.grad is not grad for grad in kept)
        kept.append(p.grad)
        optimizer.zero_grad()


def test_a_consumed_gradient_that_nobody_keeps_is_used_again():
    """Also where Python has looked at it, as zero_grad() does."""
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    seen = set()
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        seen.add(p.grad._cdata)
        optimizer.zero_grad()
    assert len(seen) == 1


def test_a_consumed_gradient_that_was_told_to_require_one_is_not_used_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    p.sum().backward()
    optimizer.step()
    p.grad.requires_grad_()
    optimizer.zero_grad()
    p.sum().backward()
    assert not p.grad.requires_grad


# Gradients that are overwritten by hand.


def with_all(value):
    """`p.grad[...] = value`"""
    return lambda p: p.grad.__setitem__(..., value)


def replace_by_zeros(p):
    p.grad = torch.zeros_like(p.grad)


def draw(p):
    torch.manual_seed(3)
    p.grad.normal_()


OVERWRITES = {
    "zero_": lambda p: p.grad.zero_(),
    "zero_ of data": lambda p: p.grad.data.zero_(),
    "zero_ of detach()": lambda p: p.grad.detach().zero_(),
    "detach_, zero_": lambda p: p.grad.detach_().zero_(),
    "fill_": lambda p: p.grad.fill_(0.5),
    "fill_ with a tensor": lambda p: p.grad.data.fill_(torch.tensor(0.5)),
    "copy_": lambda p: p.grad.copy_(torch.linspace(0, 1, p.numel()).view_as(p)),
    "copy_ of a number": lambda p: p.grad.detach().copy_(torch.tensor(2.0)),
    "[...] = number": with_all(0.25),
    "[...] = tensor": with_all(torch.tensor(0.25)),
    "[:] =": lambda p: p.grad.data.__setitem__(slice(None), 0.0),
    "normal_": draw,
    "init.uniform_": lambda p: (torch.manual_seed(3), nn.init.uniform_(p.grad)),
    "_foreach_zero_": lambda p: torch._foreach_zero_([p.grad]),
    "_foreach_zero_ of aliases": lambda p: torch._foreach_zero_([p.grad.data, p.grad.detach()]),
    "_foreach_copy_": lambda p: torch._foreach_copy_([p.grad], [torch.ones_like(p)]),
    "zeros_like": replace_by_zeros,
    "data =": lambda p: setattr(p.grad, "data", torch.zeros_like(p)),
}
IN_PLACE = [name for name in OVERWRITES if name not in ("zeros_like", "data =")]


def overwriting(write, aliases=False):
    """A script that overwrites all gradients after each step(); the next ones are added."""

    def iteration(model, optimizer, i):
        loss_of(model, i).backward()
        optimizer.step()
        held = [(p.grad.data, p.grad.detach()) for p in model.parameters() if aliases]
        with torch.no_grad():
            for p in model.parameters():
                write(p)
        yield "gradients", [p.grad for p in model.parameters()]
        yield "aliases", held

    return trained(sgd, iteration=iteration)


@pytest.mark.parametrize("way", OVERWRITES)
def test_gradients_overwritten_after_step(way):
    same(overwriting(OVERWRITES[way]), mode="backward")


@pytest.mark.parametrize("way", IN_PLACE)
def test_aliases_of_an_overwritten_gradient_have_its_numbers(way):
    same(overwriting(OVERWRITES[way], aliases=True), mode="backward")


def test_gradients_zeroed_by_hand_are_updated_in_backward_all_the_same():
    model, optimizer = fused_backward()
    for i in range(4):
        before = weights(model)
        loss_of(model, i).backward()
        assert not any(torch.equal(p, before[name]) for name, p in model.state_dict().items())
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()


def is_left_to_step(p):
    """A DTensor's gradient may be: now and then, on a busy machine, somebody still has the first
    one of a backward pass when it is complete."""
    return isinstance(p, DTensor) and not hasattr(p.grad, "_optfuse_consumed")


def refused_before_step(way, model_of, optimizer_of):
    def script(wrap):
        model = model_of()
        optimizer = wrap(optimizer_of(model.parameters()))
        left = 0
        for i in range(3):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            if wrap.fused:
                for p in model.parameters():
                    if is_left_to_step(p):
                        left += 1
                        continue
                    refused(lambda p=p: OVERWRITES[way](p), "between backward() and step()")
                    refused(p.grad.sum, "already applied")
            optimizer.step()
        assert left <= 2
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("way", IN_PLACE)
def test_gradients_overwritten_between_backward_and_step_are_refused(way):
    """The gradient stays as it is, and so does the training."""
    same(refused_before_step(way, net, sgd), mode="backward")


def replicated():
    """Its parameters are DTensors."""
    mesh = init_device_mesh("cpu", (1,))
    return distribute_module(
        net(),
        mesh,
        input_fn=lambda _, inputs, mesh: DTensor.from_local(*inputs, mesh),
        output_fn=lambda _, output, mesh: output.to_local(),
    )


ON_ALIASES = (
    "zero_ of data",
    "zero_ of detach()",
    "fill_ with a tensor",
    "copy_ of a number",
    "[:] =",
    "_foreach_zero_ of aliases",
)


@pytest.mark.parametrize("way", [way for way in IN_PLACE if way not in ON_ALIASES])
def test_dtensors_overwritten_between_backward_and_step_are_refused(way, gloo):
    same(refused_before_step(way, replicated, adamw), mode="backward")


@pytest.mark.parametrize("way", ON_ALIASES)
@pytest.mark.parametrize("when", ("before step", "after step"))
def test_aliases_of_a_consumed_dtensor_can_not_be_overwritten(way, when, gloo):
    def script(wrap):
        model = replicated()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            if when == "after step":
                optimizer.step()
            if wrap.fused:
                for p in model.parameters():
                    with pytest.raises(RuntimeError):
                        OVERWRITES[way](p)
                    refused(p.grad.sum, "already applied")
            if when == "before step":
                optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode="backward")


@pytest.mark.parametrize("build", (net, replicated), ids=("tensors", "DTensors"))
def test_a_kept_gradient_is_not_that_of_the_next_pass(build, gloo):
    def script(wrap):
        model = build()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(4):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            if i == 1:
                kept = [p.grad for p in model.parameters()]
        for p, old in zip(model.parameters(), kept, strict=True):
            assert p.grad is not old
            old.zero_()
        if wrap.fused:
            for p in model.parameters():
                refused(p.grad.sum, "already applied")
        yield "kept", kept
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_zeros_may_be_made_like_a_consumed_gradient_at_any_time():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    for p in model.parameters():
        assert torch.equal(torch.zeros_like(p.grad), torch.zeros_like(p))
        assert torch.equal(p.grad.new_ones(3), torch.ones(3))
        assert p.grad.new_tensor([2.0]).tolist() == [2.0]
        assert torch.empty_like(p.grad).shape == p.shape
    optimizer.step()


TIMES_ZERO = {
    "mul_": lambda g: g.mul_(0),
    "*=": lambda g: g.__imul__(0),
    "mul_ of data": lambda g: g.data.mul_(0),
}


@pytest.mark.parametrize("way", TIMES_ZERO)
def test_a_product_with_zero_needs_the_numbers_and_names_zero_(way):
    """Stock leaves -0.0 and NaN."""
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    refused(lambda: TIMES_ZERO[way](model[0].weight.grad), "already applied", way_out="zero_()")


def test_a_gradient_that_could_not_be_overwritten_is_still_consumed():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    grad = model[0].weight.grad
    with pytest.raises(RuntimeError, match="must match"):
        grad.copy_(torch.ones(5, 7))
    refused(grad.sum, "already applied")
    refused(lambda: grad.copy_(grad), "already applied")
    refused(lambda: torch._foreach_copy_([grad], [model[2].weight.grad]), "already applied")
    assert grad.zero_().count_nonzero() == 0


def test_gradients_without_storage_are_overwritten_in_one_list_with_consumed_ones():
    def script(wrap):
        model, sparse = net(), nn.Embedding(4, 3, sparse=True)
        optimizer = wrap(sgd(model.parameters()))
        for i in range(3):
            (loss_of(model, i) + sparse(torch.tensor([1, 2])).sum()).backward()
            optimizer.step()
            grads = [sparse.weight.grad, *(p.grad for p in model.parameters())]
            torch._foreach_zero_(grads)
            yield "gradients", [grad.to_dense() for grad in grads]
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_an_alias_that_someone_keeps_is_none_of_the_next_gradient():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    kept = [p.grad.data for p in model.parameters()]
    train(model, optimizer, 1)
    for alias, p in zip(kept, model.parameters(), strict=True):
        alias.zero_()
        refused(p.grad.sum, "already applied")


def test_a_gradient_that_outlives_its_optimizer_may_be_overwritten():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    del optimizer
    assert model[0].weight.grad.fill_(2.0).mean() == 2


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_the_storage_of_a_consumed_gradient_has_an_error_of_ours():
    """PyTorch's is_shared() would end the process."""
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    grad = model[0].weight.grad
    storage = grad.untyped_storage()
    for ask in (
        grad.is_shared,
        storage.is_shared,
        storage.data_ptr,
        storage.clone,
        storage.share_memory_,
    ):
        refused(ask, "already applied and freed")
    grad.zero_()
    assert storage.nbytes() == grad.numel() * 4 and not storage.is_shared()
    storage.resize_(0)
