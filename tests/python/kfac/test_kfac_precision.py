# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.kfac() in mixed precision: products are of float32, and GradScaler's scale is taken
out of them; a step that it skips commits nothing."""

import pytest
import torch
from kfac_cases import EXACT, OFTEN, SELDOM, STEPS, agree, mlp, mlp_loss, rows, seen, sgd
from torch import nn

MODES = pytest.mark.parametrize("mode", (None, "forward"), ids=("stock", "fused"))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_under_autocast_products_are_of_float32(dtype):
    """A product of bfloat16 would be off by 1e-3."""

    def script(arrange):
        model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(inplace=True), nn.Flatten())
        model.extend([nn.Linear(96, 32), nn.Tanh(), nn.Linear(32, 3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        arranged = arrange(model, optimizer, **OFTEN)
        for i in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                y = model(rows(i, 9, 2, 6, 6).float())
            y.float().sin().square().mean().backward()
            arranged.step()
            for name in ("0", "3", "5"):
                yield name, arranged.factors(name)

    ours, _ = agree(script, tolerance=2e-6)
    assert ours[0][1][0].dtype == torch.float32


@pytest.mark.parametrize("layer", ("linear", "conv"))
def test_parameters_of_bfloat16(layer):
    def script(arrange):
        model = nn.Linear(6, 5) if layer == "linear" else nn.Conv2d(2, 5, 3)
        model = model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        arranged = arrange(model, optimizer, **OFTEN)
        x = rows(0, 9, 6) if layer == "linear" else rows(0, 9, 2, 5, 5)
        model(x.bfloat16()).float().sin().square().mean().backward()
        arranged.step()
        yield "factors", arranged.factors("")

    agree(script, tolerance=1e-6)


class Scaled:
    """Trains as GradScaler does with ours, and without one with the reference: a scale that is
    a power of two changes no bit of float64, and a step that is skipped is none."""

    def __init__(self, arranged, optimizer, scale, growth):
        self.arranged, self.optimizer = arranged, optimizer
        self.scaler = None
        if arranged.is_ours:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)

    def backward(self, loss):
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self, bad, max_norm):
        parameters = self.optimizer.param_groups[0]["params"]
        if self.scaler and max_norm:
            self.scaler.unscale_(self.optimizer)
        if max_norm and (self.scaler or not bad):
            nn.utils.clip_grad_norm_(parameters, max_norm)
        if self.scaler:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            assert (self.scaler.get_scale() < before) == bad, "the step should be skipped"
        elif bad:
            self.arranged.discard()
        else:
            self.arranged.step()


@MODES
@pytest.mark.parametrize("max_norm", (None, 0.05), ids=("", "unscaled and clipped"))
@pytest.mark.parametrize("broken", ("loss", "gradient"))
@pytest.mark.parametrize(
    ("scale", "growth"), [(1024.0, 1000), (2.0**10, 2), (3.0, 1000)], ids=("static", "growing", "3")
)
def test_grad_scaler(scale, growth, broken, max_norm, mode):
    """Steps 0, 3 and 4 are skipped; each step has two passes."""

    def script(arrange):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        training = Scaled(arranged, optimizer, scale, growth)
        for i in range(STEPS):
            bad = i in (0, 3, 4)
            optimizer.zero_grad()
            for part in range(2):
                loss = mlp_loss(model, 2 * i + part) / 2
                training.backward(loss * float("inf") if bad and broken == "loss" else loss)
            if bad:
                model[2].weight.grad[1, 1] = float("nan")
            training.step(bad, max_norm)
        yield from seen(model, arranged, "0", "4", "8")

    # GradScaler multiplies by 1 / scale in float32, which is off by 1e-8 for a scale of 3.
    agree(script, mode, tolerance=1e-7 if scale == 3.0 else EXACT)


def test_a_scaler_that_is_disabled():
    def script(arrange):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(mlp_loss(model, i)).backward()
            if arranged.is_ours:
                scaler.step(optimizer)
            else:
                arranged.step()
            scaler.update()
        yield from seen(model, arranged, "0", "8")

    agree(script)
