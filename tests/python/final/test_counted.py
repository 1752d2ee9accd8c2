# SPDX-License-Identifier: BSD-3-Clause
"""register(random="counter"): a class's own draws are functions of parameter, update and draw, in
every mode and any order of gradients."""

import copy

import pytest
import torch
from test_step_parameter import MODES
from torch import nn

import optfuse
from optfuse._registered import register

GENERATOR = torch.Generator().manual_seed(42)


class Rounded(torch.optim.Optimizer):
    """Rounds its bfloat16 parameters stochastically, and draws a number that Python reads."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def integers(self, wide):
        return torch.randint_like(wide, 1 << 16, dtype=torch.int32)

    def number(self):
        return float(torch.rand([], generator=GENERATOR))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p].setdefault("n", 0)
                self.state[p]["n"] += 1
                wide = p.float().add_(p.grad.float(), alpha=-group["lr"])
                bits = self.integers(wide)
                wide.mul_(1 - 1e-3 * self.number())
                bits.add_(wide.view(torch.int32)).bitwise_and_(-65536)
                p.copy_(bits.view(torch.float32))


class Played(Rounded):
    """The same draws, as the page says them."""

    def words(self, shape, stream):
        p, number = self.now
        step = self.state[p]["n"]
        bits = optfuse.random_bits(self.seed, step, number, stream, shape, torch.float16)
        return bits.to(torch.int64) & 0xFFFFFFFF

    def integers(self, wide):
        return (self.words(wide.shape, 0) >> 16).to(torch.int32)

    def number(self):
        return float((self.words([], 1) >> 8) * 2.0**-24)

    def step(self, closure=None):
        group = self.param_groups[0]
        params = group["params"]
        self.seed = group.get("random_seed", 0)
        for i, p in enumerate(params):
            self.now = p, i
            group["params"] = [p]
            super().step()
        group["params"] = params


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)).bfloat16()


def train(model, opt, steps=4, first=0):
    for turn in range(first, first + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(turn)).bfloat16()
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    return list(model.parameters())


@pytest.fixture(autouse=True)
def registered():
    register(Rounded, random="counter")
    yield
    register(Rounded, per_parameter=False)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_draws_are_those_of_random_bits(mode, seed):
    model, other = net(), net()
    opt = optfuse.fuse(Rounded(model.parameters()), mode)
    played = Played(other.parameters())
    opt.param_groups[0]["random_seed"] = played.param_groups[0]["random_seed"] = seed
    before = torch.get_rng_state(), GENERATOR.get_state()
    assert all(map(torch.equal, train(model, opt), train(other, played)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], GENERATOR.get_state())


@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_a_resumed_run_goes_on_with_the_same_bits(mode):
    model = net()
    opt = optfuse.fuse(Rounded(model.parameters()), mode)
    train(model, opt, 2)
    twin = copy.deepcopy(model)
    its = optfuse.fuse(Rounded(twin.parameters()), mode)
    its.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert all(map(torch.equal, train(model, opt, 2, 2), train(twin, its, 2, 2)))


@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_another_draw_is_refused(mode):
    class Normal(Rounded):
        def integers(self, wide):
            return torch.randn_like(wide).to(torch.int32)

    register(Normal, random="counter")
    model = net()
    with pytest.raises(optfuse.Error, match="Normal draws random numbers by aten.randn_like"):
        train(model, optfuse.fuse(Normal(model.parameters()), mode))
