# SPDX-License-Identifier: BSD-3-Clause
"""The trainers' protocol: a hook of their own calls step_parameter(), in every mode."""

import copy

import pytest
import torch
from torch import nn
from trainers import OPTIMIZERS, WRONG_IN_16_BITS, Factored, same

import optfuse

MODES = ["forward", "backward", optfuse.Backward(final=True)]


def net(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 8)).to(dtype)


def train(model, opt, narrow):
    """OneTrainer's hook; kohya's is step_param()."""
    seen = []

    def hook(p, group, i):
        opt.step_param(p, group) if i % 2 else opt.step_parameter(p, group, i)
        seen.append(p.detach().clone())  # the update has run
        p.grad = None

    for group in opt.param_groups:
        for i, p in enumerate(group["params"]):
            p.register_post_accumulate_grad_hook(lambda p, g=group, i=i: hook(p, g, i))
    g = torch.Generator().manual_seed(1)
    for turn in range(4):
        x = torch.randn(4, 8, generator=g).to(narrow)
        model(x).float().square().mean().backward()
        if turn == 2:
            opt.param_groups[0]["lr"] *= 0.5
    return seen + list(model.parameters())


def eager(make, params):
    opt = make(params)

    def step_parameter(p, group, i=None):
        single = make([p])
        single.state = opt.state
        single.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        single.step()

    opt.step_parameter = opt.step_param = step_parameter
    return opt


@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_its_bits_are_those_of_the_eager_class(kind, dtype, mode):
    if kind in WRONG_IN_16_BITS and dtype != torch.float32:
        pytest.skip("stock is wrong there")
    model, other = net(dtype), net(dtype)
    expected = train(other, eager(OPTIMIZERS[kind], other.parameters()), dtype)
    opt = optfuse.fuse(OPTIMIZERS[kind](model.parameters()), mode)
    assert opt.supports_fused_back_pass
    assert all(map(same, train(model, opt, dtype), expected))


def test_a_stale_group_is_refused():
    model = net(torch.float32)
    opt = optfuse.fuse(OPTIMIZERS["adamw"](model.parameters()), "backward")
    group = opt.param_groups[0]
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(optfuse.Error, match="load_state_dict"):
        opt.step_parameter(model[0].weight, group, 0)
    with pytest.raises(optfuse.Error, match="no parameter of this optimizer"):
        opt.step_parameter(torch.zeros(1), group, 0)


def test_backward_mode_confirms_what_it_has_updated():
    model = net(torch.float32)
    opt = optfuse.fuse(OPTIMIZERS["adamw"](model.parameters()), "backward")
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            opt.step_parameter(p, opt.param_groups[0], 0)
            p.grad = None
        assert all(map(torch.equal, before, model.parameters()))


def test_a_class_that_has_it_is_called_by_it():
    class Own(Factored):
        def step_parameter(self, p, group, i):
            p.data.sub_(p.grad)

    model = net(torch.float32)
    opt = optfuse.fuse(Own(model.parameters()))
    p = model[0].weight
    before, p.grad = p.detach().clone(), torch.ones_like(p)
    opt.step_parameter(p, opt.param_groups[0], 0)
    assert torch.equal(before - 1, p)


def by_groups(model, wrap):
    """kohya's "fused optimizer groups": an optimizer for some parameters each, which steps at the
    last of their gradients."""
    params = list(model.parameters())
    owners, left = {}, {}
    for some in (params[:1], params[1:]):
        opt = wrap(torch.optim.AdamW(some, lr=1e-2, fused=True))
        owners.update(dict.fromkeys(some, opt))
        left[opt] = len(some)

    def hook(p):
        opt = owners[p]
        left[opt] -= 1
        if left[opt] == 0:
            opt.step()
            opt.zero_grad(set_to_none=True)
            left[opt] = sum(owner is opt for owner in owners.values())

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    for turn in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(turn))
        model(x).square().mean().backward()
    return params


def test_optimizers_that_step_when_all_their_hooks_were_called():
    model, other = net(torch.float32), net(torch.float32)
    stock = by_groups(other, lambda opt: opt)
    assert all(map(torch.equal, by_groups(model, optfuse.fuse), stock))


def accumulated(model, opt, scaled):
    """OneTrainer's hook: on update steps alone, behind unscaling and clipping one tensor."""
    updates = [False]

    def hook(p, group, i):
        if not updates[0]:
            return
        if scaled:
            p.grad.div_(256.0)
        nn.utils.clip_grad_norm_(p, 0.01)
        opt.step_parameter(p, group, i)
        p.grad = None

    for group in opt.param_groups:
        for i, p in enumerate(group["params"]):
            p.register_post_accumulate_grad_hook(lambda p, g=group, i=i: hook(p, g, i))
    for turn in range(6):
        updates[0] = turn % 2 == 1
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(turn))
        loss = model(x).square().mean()
        (loss * 256.0 if scaled else loss).backward()
        if updates[0]:
            opt.step()
            opt.zero_grad(set_to_none=True)
    return list(model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "factored"])
def test_accumulation_with_a_clip_of_each_tensor(kind, scaled):
    model, other = net(torch.float32), net(torch.float32)
    expected = accumulated(other, eager(OPTIMIZERS[kind], other.parameters()), scaled)
    opt = optfuse.fuse(OPTIMIZERS[kind](model.parameters()))
    assert all(map(torch.equal, accumulated(model, opt, scaled), expected))


class Scaler(torch.amp.GradScaler):
    """OneTrainer's: it unscales the gradient of one parameter, and leaves that one's update out.
    The last parameter decides what becomes of the scale."""

    def unscale_parameter_(self, p, optimizer):
        found = torch.zeros(1)
        inverse = self._scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad], found, inverse)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {p.device: found}

    def maybe_step_parameter(self, p, group, i, optimizer):
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not any(f.item() for f in found.values()):
            optimizer.step_parameter(p, group, i)


def by_their_scaler(model, opt):
    scaler = Scaler("cpu", init_scale=1024.0, growth_interval=2)

    def hook(p, group, i):
        scaler.unscale_parameter_(p, opt)
        nn.utils.clip_grad_norm_(p, 0.5)
        scaler.maybe_step_parameter(p, group, i, opt)
        p.grad = None

    scales = []
    for group in opt.param_groups:
        for i, p in enumerate(group["params"]):
            p.register_post_accumulate_grad_hook(lambda p, g=group, i=i: hook(p, g, i))
    for turn in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(turn))
        bad = model[(turn - 2) * 2].weight if turn in (2, 3) else None
        spoil = bad.register_hook(lambda g: g * torch.inf) if turn in (2, 3) else None
        scaler.scale(model(x).square().mean()).backward()
        opt.step()
        scaler.update()
        scales.append(scaler.get_scale())
        if spoil is not None:
            spoil.remove()
    return [*model.parameters(), torch.tensor(scales)]


@pytest.mark.parametrize("kind", ["adamw", "factored"])
def test_a_scaler_that_unscales_one_gradient(kind):
    model, other = net(torch.float32), net(torch.float32)
    expected = by_their_scaler(other, eager(OPTIMIZERS[kind], other.parameters()))
    assert expected[-1].diff().min() < 0  # an infinite gradient was seen
    opt = optfuse.fuse(OPTIMIZERS[kind](model.parameters()))
    assert all(map(same, by_their_scaler(model, opt), expected))


@pytest.mark.parametrize("mode", MODES[1:], ids=["backward", "final"])
def test_modes_that_update_before_that_scaler_refuse_it(mode):
    model = net(torch.float32)
    opt = optfuse.fuse(OPTIMIZERS["adamw"](model.parameters()), mode)
    with pytest.raises(optfuse.Error, match="GradScaler"):
        by_their_scaler(model, opt)


class Seeded(Factored):
    """Rounds by a generator of its class, which the trainer seeds with the number of the step."""

    generator = torch.Generator()

    def step_parameter(self, p, group, i):
        wide = p.float() - group["lr"] * p.grad.float()
        drawn = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32, generator=self.generator)
        bits = wide.view(torch.int32).add(drawn).bitwise_and_(-65536)
        p.data.copy_(bits.view(torch.float32))


@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_a_generator_that_is_seeded_before_each_step(mode):
    """Its numbers are drawn in the order of the hooks."""
    found = []
    for fused in (False, True):
        model = net(torch.bfloat16)
        opt = Seeded(model.parameters(), lr=1e-2)
        final = fused and isinstance(mode, optfuse.Backward)
        if fused:
            opt = optfuse.fuse(opt, mode)

        def hook(p, opt=opt):
            opt.step_parameter(p, opt.param_groups[0], 0)
            p.grad = None

        for p in model.parameters() if not final else ():
            p.register_post_accumulate_grad_hook(hook)
        for turn in range(4):
            Seeded.generator.manual_seed(turn)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(turn)).bfloat16()
            model(x).float().square().mean().backward()
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))
