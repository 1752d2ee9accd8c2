# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: parameters, gradients and state in any memory layout. PyTorch's fused kernels pay no heed
to strides; their reference has all in one layout, see reference.py."""

import torch
from torch import nn

from programs.deed import ALONE, BOOL, EITHER, deed
from programs.models import numbers
from programs.optimizers import CLASSES, made_by


def as_it_is(t):
    return t


def last(t):
    return t.to(memory_format=torch.channels_last)


def transposed(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def with_holes(t):
    """The same values in every other column of a wider tensor."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), 9.0, dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


def broadcast(t):
    return t[:1].expand(t.shape)


def overlapping(t):
    return torch.as_strided(t.flatten(), t.shape, [1] * t.dim())


OF_GRADIENTS = (as_it_is, last, transposed, with_holes, broadcast, overlapping)


@deed(
    ALONE,
    lay=OF_GRADIENTS[:4],
    gradient=OF_GRADIENTS,
    by=("AdamW", *(name for name in CLASSES if name not in ("AdamW", "Muon"))),
    by_hand=BOOL,
)
def tensors_in_any_layout(world, lay, gradient, by, by_hand):
    """Elements between those of the parameter are not written."""
    shape = (3, 5, 4, 7)
    p = nn.Parameter(lay(numbers(1, *shape)))
    optimizer = world.wrap(made_by(by, [p]))
    for i in range(5):
        given = gradient(numbers(10 + i, *shape))
        optimizer.zero_grad()
        if by_hand:
            p.grad = given
        else:
            hook = p.register_hook(lambda _, given=given: given)
            p.sum().backward()
            hook.remove()
        optimizer.step()
    world.see("strides", list(p.stride()))
    world.see("memory", torch.empty(0).set_(p.detach().untyped_storage()))
    world.see("state", optimizer.state_dict())


# ---- by PyTorch's for-loop: in 16 bits its operators round once more at strides

LOOPS = {
    "RMSprop": lambda params: torch.optim.RMSprop(params, foreach=False, momentum=0.9),
    "ASGD": lambda params: torch.optim.ASGD(params, foreach=False),
    "Adadelta": lambda params: torch.optim.Adadelta(params, foreach=False, weight_decay=0.1),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@deed(ALONE, by=LOOPS, dtype=DTYPES, product=True, proves=False)
def holes_from_the_beginning(world, by, dtype):
    p = nn.Parameter(with_holes(numbers(1, 9, 130).to(dtype)))
    optimizer = world.wrap(by([p]))
    for _ in range(5):
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()
    world.see("weights", p.detach())
    world.see("state", optimizer.state_dict())


def exchange(optimizer, p, what, layout):
    if what == "parameter":
        p.data = layout(p.detach().clone())
    elif what == "gradient":
        p.grad = layout(p.grad)
    else:
        optimizer.state[p]["square_avg"] = layout(optimizer.state[p]["square_avg"])


@deed(
    ALONE,
    layout=(with_holes, transposed),
    what=("parameter", "gradient", "state"),
    dtype=DTYPES,
    product=True,
    fault="strides",
)
def strides_that_come_later(world, layout, what, dtype):
    """Kernels refuse them in 16 bits."""
    p = nn.Parameter(torch.linspace(-1, 1, 63).view(7, 9).to(dtype))
    optimizer = world.wrap(LOOPS["RMSprop"]([p]))
    for i in range(5):
        p.grad = torch.linspace(-1, i, 63).view(7, 9).to(dtype)
        if i == 2 and (dtype == torch.float32 or world.fused):
            exchange(optimizer, p, what, layout)
        if i == 2 and dtype != torch.float32:
            world.refused(optimizer.step, "holes or other strides", way_out="make them contiguous")
            exchange(optimizer, p, what, torch.Tensor.contiguous)
        optimizer.step()
        world.see("weights", p.detach().contiguous())


@deed(ALONE, proves=False)
def group_with_holes(world):
    """It is not added to kernels."""
    p = nn.Parameter(numbers(1, 9, 130).half())
    optimizer = world.wrap(LOOPS["RMSprop"]([p]))
    group = {"params": [nn.Parameter(with_holes(p.detach().clone()))]}
    words = "holes", "fuse it again with all groups"
    world.refused(lambda: optimizer.add_param_group(group), *words, way_out="")
    world.see("groups", len(optimizer.param_groups))


@deed(ALONE)
def strides_of_one_element(world):
    """They mean nothing."""
    p = nn.Parameter(torch.linspace(-1, 1, 7).view(7, 1).half())
    optimizer = world.wrap(LOOPS["RMSprop"]([p]))
    for i in range(3):
        p.grad = torch.linspace(-1, i, 7).half().as_strided((7, 1), (1, 5))
        optimizer.step()
    world.see("weights", p.detach())


# ---- lazy tensors, and tensors without memory of their own


def lazily(function):
    return lambda: function(torch.ones(4))


@deed(ALONE)
def gradient_that_is_lazily_negated(world):
    """Stock's fused kernels refuse it; its for-loop resolves it."""
    a, b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
    optimizer = world.wrap(torch.optim.SGD([a, b], lr=0.1, fused=True))
    for _ in range(3):
        optimizer.zero_grad()
        (torch.complex(a, b).conj() * (1 + 3j)).real.backward()
        optimizer.step()
    world.see("weights", [a, b])


@deed(ALONE)
def gradient_that_is_a_lazy_zero(world):
    p = nn.Parameter(torch.ones(4))
    optimizer = world.wrap(torch.optim.SGD([p], lr=0.5, momentum=0.9))
    for gradient in (torch.ones(4), torch._efficientzerotensor(4)):
        p.grad = gradient if world.fused else gradient + 0  # stock's fused kernel takes none
        optimizer.step()
    world.see("weight", p)


def negated(p):
    p.data = torch._neg_view(torch.ones(4))


def expanded(p):
    p.data = torch.ones(1).expand(4)


@deed(ALONE, change=(negated, expanded), proves=False)
def parameter_without_memory_of_its_own(world, change):
    p = nn.Parameter(torch.ones(4))
    change(p)
    optimizer = world.wrap(made_by("SGD", [p]))
    p.grad = torch.ones(4)
    way_out = "param.data.resolve_neg()" if change is negated else "param.data.clone()"
    world.refused(optimizer.step, way_out=way_out)
    world.see("parameter", p.detach().clone())


STATES = {
    "resolve_neg()": torch._neg_view,
    "clone()": lambda t: t[:1].expand(4),
    "dtype": lambda t: t.double(),
    "shape": lambda t: t[:3],
    "layout": lambda t: t.to_sparse(),
}


@deed(ALONE, words=tuple(STATES), proves=False)
def state_that_can_not_be_updated(world, words):
    """In backward mode it is refused there."""
    p = nn.Parameter(torch.ones(4))
    optimizer = world.wrap(made_by("SGD", [p]))

    def iterate():
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()

    iterate()
    entry = optimizer.state[p]
    buffer = entry["momentum_buffer"]
    entry["momentum_buffer"] = STATES[words](buffer)
    world.refused(iterate, way_out=words)
    world.see("parameter", p)
    entry["momentum_buffer"] = buffer
    iterate()
    world.see("parameter", p)


@deed(ALONE, exchanges=(False, True), proves=False)
def model_that_is_moved_after_fusing(world, exchanges):
    """Where PyTorch exchanges tensors in place; else it makes new parameters."""
    model, optimizer = world.own()
    torch.__future__.set_swap_module_params_on_conversion(exchanges)
    try:
        model.to("meta") if exchanges else model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if exchanges:

        def iterate():
            model(torch.ones(1, 4, device="meta")).sum().backward()
            optimizer.step()

        world.refused(iterate, "moved to meta", way_out="")
        world.see("device", str(world.param().device))
    else:
        for _ in range(3):
            world.train()
        world.look(gradients=False)


@deed(ALONE, stock=EITHER, backward=EITHER)
def state_that_lacks_what_new_options_need(world):
    """It arrives with load_state_dict()."""
    model, optimizer = world.own()
    world.train()
    other = torch.optim.AdamW(model.parameters(), amsgrad=True, fused=True)
    optimizer.load_state_dict(other.state_dict())
    world.train()
    world.look(gradients=False)
