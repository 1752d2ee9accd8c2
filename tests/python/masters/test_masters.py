# SPDX-License-Identifier: BSD-3-Clause
"""masters(): an optimizer over float32 masters on the CPU, of bfloat16 weights on any device, has
the bits of a loop that copies gradients down and weights up by hand."""

import copy
import gc
import weakref

import pytest
import torch
from common import Fused, Stock, adamw, assert_same, batch, net, refused, run, sgd, snapshot
from on_device import DEVICE
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

import optfuse
from optfuse._patches.profiling import has_hooks

STEPS = 6


class Mine(torch.optim.Optimizer):
    """A class without kernels."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure and torch.enable_grad()(closure)()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.1).sign_(), alpha=0.01)
        return loss


class World:
    """A model in bfloat16 and an optimizer over its masters. by_hand: the loop copies."""

    def __init__(self, make, wrap, by_hand, build=net):
        self.model = build().to(torch.bfloat16)
        self.weights = list(self.model.parameters())
        self.by_hand, self.masters = by_hand, self.masters_of(by_hand)
        self.optimizer = wrap(make(self.masters))

    def masters_of(self, by_hand):
        if not by_hand:
            return optfuse.masters(self.model.parameters())
        numbers = (w.detach().to("cpu", torch.float32, copy=True) for w in self.weights)
        return [nn.Parameter(number) for number in numbers]

    def pairs(self):
        return zip(self.masters, self.weights, strict=True)

    def loss(self, i):
        x, y = (part.to(torch.bfloat16) for part in batch(i))
        return nn.functional.mse_loss(self.model(x), y)

    def down(self):
        for m, w in self.pairs():
            m.grad = None if w.grad is None else w.grad.to("cpu", torch.float32)

    @torch.no_grad()
    def up(self):
        for m, w in self.pairs():
            w.copy_(m)

    def step(self, step=None):
        step = step or self.optimizer.step
        if self.by_hand:
            self.down()
        step()
        if self.by_hand:
            self.up()

    def zero_grad(self, set_to_none=True):
        (self.model if self.by_hand else self.optimizer).zero_grad(set_to_none)

    def looks(self):
        yield "weights", self.weights
        yield "gradients", [w.grad for w in self.weights]

    def everything(self):
        yield "masters", [m.detach() for m in self.masters]
        yield "state", self.optimizer.state_dict()


def plainly(world, i):
    world.zero_grad()
    world.loss(i).backward()
    world.step()


# Iterations of scripts


def clips(world, i):
    world.zero_grad(set_to_none=i % 3 != 0)
    world.loss(i).backward()
    clip_grad_norm_(world.model.parameters(), 0.05)
    world.step()


def accumulates(world, i):
    for k in range(3):
        (world.loss(3 * i + k) / 3).backward()
    world.step()
    world.zero_grad(set_to_none=False)


def schedules(world, i):
    if i == 0:
        world.scheduler = torch.optim.lr_scheduler.ExponentialLR(world.optimizer, 0.5)
    plainly(world, i)
    world.scheduler.step()


def loads(world, i):
    """As a script that goes on from a checkpoint, of which it has the weights, too."""
    plainly(world, i)
    saved = snapshot(([m.detach() for m in world.masters], world.optimizer.state_dict()))
    weights = snapshot(dict(world.model.state_dict()))
    plainly(world, i + 10)
    world.optimizer.load_state_dict(saved[1])
    with torch.no_grad():
        for m, number in zip(world.masters, saved[0], strict=True):
            m.copy_(number)
    if i % 2:
        world.model.load_state_dict(weights)
        if not world.by_hand:
            world.masters.take_over()
    else:
        world.up() if world.by_hand else world.masters.hand_over()


def loads_other_weights(world, i):
    plainly(world, i)
    if i == 3:
        with torch.no_grad():
            world.weights[0].mul_(0.3)
            if world.by_hand:
                world.masters[0].copy_(world.weights[0])
            else:
                world.masters.take_over()


def has_no_gradient_for_some(world, i):
    world.zero_grad()
    world.loss(i).backward()
    world.weights[i % 3].grad = None
    world.step()


def adds_a_group(world, i):
    if i == 0:
        (group,) = world.optimizer.param_groups
        group["params"], late = group["params"][:2], group["params"][2:]
        world.late = late
    if i == 3:
        world.optimizer.add_param_group({"params": world.late, "lr": 0.003})
    world.model.zero_grad()
    world.loss(i).backward()
    world.step()


def scaler_of(world):
    """By hand its numbers are on the CPU, since stock's step() there would not wait for them."""
    made = torch.amp.GradScaler(DEVICE or "cpu", init_scale=64.0, growth_interval=2)
    if world.by_hand:
        made.scale(torch.zeros((), device="cpu"))
    return made


def backward_of_a_scaled_loss(world, i):
    if i == 0:
        world.scaler = scaler_of(world)
    world.zero_grad()
    world.scaler.scale(world.loss(i)).backward()
    if i == 2:
        world.weights[0].grad[0] = torch.inf


def unscales_and_clips(world, i):
    backward_of_a_scaled_loss(world, i)
    looked = torch.optim.SGD(world.weights) if world.by_hand else world.optimizer
    world.scaler.unscale_(looked)
    clip_grad_norm_(world.model.parameters(), 0.05)
    if not world.by_hand:
        world.scaler.step(world.optimizer)
    elif i != 2:
        world.step()
    world.scaler.update()


def steps_by_a_scaler(world, i):
    backward_of_a_scaled_loss(world, i)
    world.step(lambda: world.scaler.step(world.optimizer))
    world.scaler.update()
    world.zero_grad()  # they are unscaled where step() did not do it


def steps_with_a_closure(world, i):
    def closure():
        if world.by_hand:
            world.up()
        world.zero_grad()
        loss = world.loss(i)
        loss.backward()
        if world.by_hand:
            world.down()
        return loss

    loss = world.optimizer.step(closure)
    if world.by_hand:
        world.up()
    return loss


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


def nesterov(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, fused=True)


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=1e-3, foreach=False)


def lion(params):
    return optfuse.optim.Lion(params, lr=1e-3)


KINDS = (adamw, sgd, nesterov, lion, Mine)
KINDS += () if DEVICE else (rmsprop,)  # which makes its counter on the default device
SCRIPTS = {
    **{f"plainly-{make.__name__}": (plainly, make) for make in KINDS},
    **{f"closure-{make.__name__}": (steps_with_a_closure, make) for make in (adamw, Mine, lbfgs)},
    **{
        act.__name__: (act, adamw)
        for act in (
            *(clips, accumulates, schedules, loads, loads_other_weights, has_no_gradient_for_some),
            *(adds_a_group, unscales_and_clips, steps_by_a_scaler),
        )
    },
    "by a scaler that leaves steps out": (unscales_and_clips, Mine),
}


def played(act, make, by_hand=False, build=net):
    def script(wrap):
        world = World(make, wrap, by_hand, build)
        for i in range(STEPS):
            loss = act(world, i)
            if loss is not None:
                yield "loss", loss
            yield from world.looks()
        yield from world.everything()

    return script


WAYS = "stock", "forward", "backward"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("act", "make"), SCRIPTS.values(), ids=SCRIPTS)
def test_the_bits_are_those_of_a_loop_by_hand(act, make, way):
    by_hand = run(played(act, make, by_hand=True), Stock())
    wrap = Stock() if way == "stock" else Fused(way)
    ours = run(played(act, make), wrap)
    for i, (a, b) in enumerate(zip(ours, by_hand, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a[1], b[1])
    if way == "forward":
        wrap.prove()


def test_clipping_in_step_is_that_of_widened_gradients():
    def script(world, i):
        world.zero_grad()
        world.loss(i).backward()
        if world.by_hand:
            world.down()
            clip_grad_norm_(world.masters, 0.05)
            world.optimizer.step()
            world.up()
        else:
            world.step()

    by_hand = run(played(script, adamw, by_hand=True), Stock())
    ours = run(played(script, adamw), Fused("forward", max_grad_norm=0.05))
    for i, (a, b) in enumerate(zip(ours, by_hand, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a[1], b[1])


def test_delayed_updates_find_the_gradients_of_their_steps():
    def fuse(world):
        delay = {world.masters[0]: 2, world.masters[1]: 1}
        optfuse.fuse(world.optimizer, optfuse.Forward(delay=delay))

    def script(world, i):
        if i == 0:
            fuse(world)
        plainly(world, i)

    by_hand, ours = (run(played(script, adamw, by_hand), Stock()) for by_hand in (True, False))
    for i, (a, b) in enumerate(zip(ours, by_hand, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a[1], b[1])


# Who may write what


@pytest.fixture(params=("stock", "forward"))
def world(request):
    """After a step."""
    wrap = Stock() if request.param == "stock" else Fused("forward")
    made = World(adamw, wrap, by_hand=False)
    plainly(made, 0)
    return made


def unchanged(world):
    return snapshot([*world.looks(), *world.everything()])


def refused_step(world, *words, way_out):
    """It changes nothing."""
    before = unchanged(world)
    refused(world.step, *words, way_out=way_out)
    assert_same("the world", unchanged(world), before)


WRITES = {
    "in place": lambda w: w.detach().mul_(0.5),
    "by the first element": lambda w: w.detach().view(-1)[:1].zero_(),
    "init": lambda w: nn.init.constant_(w, 0.1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_step_after_others_have_written_a_weight_is_refused_until_masters_take_it_over(
    world, write
):
    world.loss(1).backward()
    write(world.weights[2])
    refused_step(world, "have written weight 2 of shape (8, 8)", way_out="take_over()")
    others = snapshot([m.detach() for m in world.masters])
    world.masters.take_over()
    taken = world.weights[2].detach().float().cpu()
    assert_same("the master", world.masters[2].detach(), taken)
    others[2] = taken
    assert_same("the masters", [m.detach() for m in world.masters], others)
    world.step()


def test_loaded_weights_are_taken_over_and_masters_that_are_theirs_keep_all_their_bits(world):
    saved = snapshot(dict(world.model.state_dict()))
    numbers = snapshot([m.detach() for m in world.masters])
    assert any((n != n.bfloat16()).any() for n in numbers)
    world.model.load_state_dict(saved)
    refused_step(world, way_out="take_over()")
    world.masters.take_over()
    assert_same("the masters", [m.detach() for m in world.masters], numbers)
    plainly(world, 1)


def test_a_step_after_others_have_written_a_master_is_refused_until_it_is_handed_over(world):
    with torch.no_grad():
        world.masters[1].fill_(1 / 3)
    refused_step(world, "written the master of weight 1 of shape (8,)", way_out="hand_over()")
    world.masters.hand_over()
    assert (world.weights[1] == torch.tensor(1 / 3).bfloat16()).all()
    plainly(world, 1)


def test_a_step_is_refused_where_a_master_has_a_gradient_of_its_own(world):
    world.masters[0].square().sum().backward()
    refused(world.step, "weight 0 of shape (8, 6)", way_out="zero_grad()")
    world.zero_grad()
    plainly(world, 1)


def test_a_step_that_fails_half_way_is_noticed(world):
    world.loss(1).backward()

    def fail(optimizer, *_):
        with torch.no_grad():
            world.masters[0].add_(1)
        raise KeyboardInterrupt

    hook = world.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        world.step()
    hook.remove()
    refused(world.step, "the master of weight 0", way_out="hand_over()")


CLIPS = {
    "norm": lambda world: nn.utils.clip_grad_norm_(world.masters, 1.0),
    "norm, by its early name": lambda world: clip_grad_norm_(world.masters, 1.0),
    "norm, by its other name": lambda world: clip_grad.clip_grad_norm_(world.masters, 1.0),
    "value": lambda world: nn.utils.clip_grad_value_(world.masters, 1.0),
    "value, by its early name": lambda world: clip_grad_value_(world.masters, 1.0),
    "with a norm": lambda world: nn.utils.clip_grads_with_norm_(
        world.masters, 1.0, torch.ones((), device="cpu")
    ),
    "ours": lambda world: optfuse.clip_grad_norm_(world.optimizer, 1.0),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipping_masters_is_refused(world, clip):
    world.loss(1).backward()
    before = unchanged(world)
    refused(lambda: clip(world), "weight 0 of shape (8, 6)", way_out="model.parameters()")
    assert_same("the world", unchanged(world), before)


def test_a_master_of_a_weight_that_has_gone_is_refused(world):
    world.weights.clear()
    world.model[0] = nn.Linear(6, 8).to(torch.bfloat16)
    gc.collect()
    refused(world.optimizer.step, "weight 0 of shape (8, 6)", way_out="optfuse.masters() again")
    refused(world.masters.take_over, "weight 0", way_out="optfuse.masters() again")


def test_nothing_of_ours_owns_weights_or_masters():
    model = net()
    masters = optfuse.masters(model.parameters())
    weight, master = weakref.ref(model[0].weight), weakref.ref(masters[0])
    del model
    gc.collect()
    assert weight() is None and master() is not None
    del masters
    gc.collect()
    assert master() is None


class Own(torch.Tensor):
    pass


UNFIT = {
    "twice": (lambda w: [w, w], "twice"),
    "computed": (lambda w: [w * 2], "computed from others"),
    "integers": (lambda w: [torch.ones(3, dtype=torch.int32)], "torch.int32"),
    "float64": (lambda w: [w.detach().double()], "torch.float64"),
    "complex": (lambda w: [torch.ones(3, dtype=torch.complex64)], "torch.complex64"),
    "meta": (lambda w: [torch.ones(3, device="meta")], "has no numbers"),
    "sparse": (lambda w: [torch.eye(3, device="cpu").to_sparse()], "is sparse"),
    "subclass": (lambda w: [w.detach().as_subclass(Own)], "Own"),
}


@pytest.mark.parametrize(("params", "why"), UNFIT.values(), ids=UNFIT)
def test_masters_refuses_what_it_can_not_train(params, why):
    refused(lambda: optfuse.masters(params(net()[0].weight)), why, way_out="masters()")


def test_masters_have_shapes_order_and_dtype_and_need_gradients_as_their_weights():
    model = net().to(torch.float16)
    model[0].bias.requires_grad_(False)
    for dtype in (torch.float32, torch.float64):
        masters = optfuse.masters(model.parameters(), dtype)
        for m, w in zip(masters, model.parameters(), strict=True):
            assert type(m) is nn.Parameter and m.is_leaf and m.requires_grad is w.requires_grad
            assert_same("its number", m.detach(), w.detach().cpu().to(dtype))
    weight = nn.Parameter(torch.ones(3, device="cpu"))
    optfuse.masters([weight])[0].detach().zero_()
    assert weight.sum() == 3, "a master has the memory of its weight"
    assert optfuse.masters([]) == []


def test_copied_masters_are_a_list_of_parameters():
    masters = optfuse.masters(net().parameters())
    copied = copy.deepcopy(masters)
    assert type(copied) is list and all(type(m) is nn.Parameter for m in copied)
    assert_same("parameters", [m.detach() for m in copied], [m.detach() for m in masters])


def test_an_optimizer_of_other_parameters_is_as_before(world):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad(set_to_none=i == 0)
            nn.functional.mse_loss(model(batch(i)[0]), batch(i)[1]).backward()
            yield "norm", clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        yield "parameters", dict(model.state_dict())

    assert_same("all", run(script, Fused("forward")), run(script, Stock()))


def test_hooks_of_masters_are_none_of_other_optimizers():
    """With one a class without kernels would be left to step(), and step() takes longer."""
    masters = optfuse.masters(net().parameters())
    assert has_hooks(sgd(masters)) and not has_hooks(sgd(net().parameters()))
    model = net()
    optimizer = optfuse.fuse(Mine(model.parameters()), "backward")
    for i in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch(i)[0]), batch(i)[1]).backward()
        optimizer.step()
    if DEVICE == "":
        refused(lambda: model[0].weight.grad.sum(), "already applied", way_out="zero_grad()")
