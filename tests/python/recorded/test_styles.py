# SPDX-License-Identifier: BSD-3-Clause
"""Classes in the styles of many packages, and PyTorch's own as anyone's, train a net with stock's
bits in both modes: parameters, gradients, state, options and attributes."""

import copy
import random

import pytest
import torch
from common import assert_same, fuse_with, snapshot
from style_classes import STYLES, MyParameter
from torch import nn

import optfuse
from optfuse._options import LINK, RECORDED

#: In backward mode left to step(), and why; the others are updated in backward().
LEFT = dict.fromkeys(
    ("Signs", "Chooses", "Lamb", "CountsLarge", "EndsAtLarge", "SumOfAll"), "looks at numbers"
)
LEFT |= {
    "Copies": "takes the address of a tensor",
    "MeanWeight": "combines several parameters",
}
#: Does what it did not do in the steps before, when it has run ahead.
RAISES = "CouplesAtTimes"
#: Loops and numbers that another dtype makes endless, or that NaN changes.
ENDLESS = {"EndsAtLarge"}


class Net(nn.Module):
    """An embedding, whose weights decode, too, a convolution, a norm and a matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 24)
        self.conv = nn.Conv1d(24, 30, 3, padding=1)
        self.norm = nn.BatchNorm1d(30)
        self.out = nn.Linear(30, 100)
        self.back = nn.Linear(100, 20)
        self.tied = nn.Linear(24, 20, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, x):
        embedded = self.table(x)
        hidden = self.norm(self.conv(embedded.transpose(1, 2))).relu()
        return self.back(self.out(hidden.mean(2)).relu()) + self.tied(embedded).mean(1)


def marked(model):
    """Parameters that classes may tell from others."""
    model.conv.weight = MyParameter(model.conv.weight.detach())
    model.out.bias.special = True
    model.back.bias.register_hook(lambda grad: grad)
    return model


def parameters(model):
    """Two groups with other options."""
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}]


def loss_of(model, step):
    drawn = torch.Generator().manual_seed(step)
    x = torch.randint(20, (6, 5), generator=drawn)
    y = torch.randint(20, (6,), generator=drawn)
    return nn.functional.cross_entropy(model(x), y)


def plain(value, places):
    """Without tensors as keys, or what knows an id()."""
    if isinstance(value, dict):
        return {places.get(id(k), k): plain(v, places) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, places) for v in value]
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor).detach()
    if type(value).__name__ == "deque":
        return [plain(v, places) for v in value]
    return value


def seen(model, optimizer, with_gradients):
    """All that a user can look at."""
    places = {id(p): i for i, p in enumerate(model.parameters())}
    left_out = {"param_groups", "state", "ids", "texts", "step", "_optfuse_link", LINK, RECORDED}
    left_out |= {"step_parameter", "step_param", "supports_fused_back_pass"}
    attributes = {k: v for k, v in vars(optimizer).items() if k not in left_out}
    attributes = {k: v for k, v in attributes.items() if not k.startswith("_")}
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    grads = [p.grad for p in model.parameters()] if with_gradients else []
    state = dict(optimizer.state)
    return snapshot(plain([model.state_dict(), state, options, attributes, grads], places))


def train(cls, mode=None, dtype=torch.float32, steps=12):
    torch.manual_seed(0)
    random.seed(0)
    model = marked(Net().to(dtype))
    optimizer = cls(parameters(model))
    if mode is not None:
        fuse_with(optimizer, mode)
    getattr(optimizer, "train", list)()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    getattr(optimizer, "eval", list)()
    return model, optimizer


def compared(cls, mode, **how):
    stock, ours = train(cls, **how), train(cls, mode, **how)
    is_forward = mode == "forward"
    assert_same("all", seen(*ours, is_forward), seen(*stock, is_forward))
    return optfuse.explain(ours[1])


@pytest.mark.parametrize("name", STYLES)
def test_forward_mode_has_stocks_bits(name):
    compared(STYLES[name], "forward")


@pytest.mark.parametrize("name", sorted(STYLES.keys() - {RAISES}))
def test_backward_mode_has_stocks_bits_and_updates_in_backward_what_can_be(name):
    said = compared(STYLES[name], "backward")
    why = f"now backward() leaves all to it, since it {LEFT.get(name)}"
    assert (f"ran 0 times at the first gradient of backward(); {why}" in said) == (name in LEFT)
    assert ("ran 10 times" in said) == (name not in LEFT)


def test_parameters_that_depend_on_each_other_in_a_later_step_are_refused():
    with pytest.raises(optfuse.Error, match="combines several parameters.*Nothing was updated"):
        train(STYLES[RAISES], "backward")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(STYLES.keys() - ENDLESS))
def test_other_dtypes(name, dtype):
    compared(STYLES[name], "forward", dtype=dtype, steps=5)
    if name != RAISES:
        compared(STYLES[name], "backward", dtype=dtype, steps=5)


# ---- those of PyTorch, which are anyone's as subclasses

OPTIM = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
    "AdamW": {"lr": torch.tensor(0.01)},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1, "maximize": True},
    "NAdam": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "Rprop": {"lr": 0.1},
    "ASGD": {"lr": 0.1, "t0": 5, "weight_decay": 0.01},
    "Adafactor": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIM)
def test_subclasses_of_pytorchs_classes(name, foreach, mode):
    class Theirs(getattr(torch.optim, name)):
        def __init__(self, groups):
            groups = [{k: v for k, v in group.items() if k != "lr"} for group in groups]
            options = copy.deepcopy(OPTIM[name])
            if foreach and isinstance(options.get("lr"), torch.Tensor):
                options["lr"] = 0.01  # which takes no tensor
            super().__init__(groups, foreach=foreach, **options)

    compared(Theirs, mode)
