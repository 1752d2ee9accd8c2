# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: a gradient that is another parameter or its state, by whatever strides. PyTorch updates
the parameters one after the other, and each reads what those before it have written."""

import threading

import torch
from torch import nn, optim

import optfuse
from programs.deed import ALONE, BOOL, LEFT, deed
from programs.models import numbers


class WritesGradients(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.01)
                    p.sub_(p.grad, alpha=group["lr"])


MAKE = {
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2),
    "WritesGradients": WritesGradients,
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2, foreach=False),
}
STATE = {"Rprop": "prev", "SGD": "momentum_buffer", "AdamW": "exp_avg", "RMSprop": "square_avg"}
LENT = {"as it is": lambda t: t, "by an alias": lambda t: t.detach(), "turned": lambda t: t.t()}
# PyTorch's fused kernels read memory in its order, whatever the strides.
CASES = {
    f"{by}, {what} {how}": (by, what, way)
    for by in STATE
    for what in ("state", "weight")
    for how, way in LENT.items()
    if (how != "turned" or by in ("Rprop", "RMSprop")) and (what, how) != ("weight", "as it is")
}
CASES["WritesGradients, weight by an alias"] = "WritesGradients", "weight", LENT["by an alias"]
SIZES = (6, 150)  # less and more elements than are updated by one thread


def three(world, by, size=6):
    params = [nn.Parameter(numbers(i, size, size)) for i in range(3)]
    return params, world.wrap(MAKE[by](params))


def steps(world, params, optimizer, borrow):
    """borrow(): gives parameters the memory of others as gradients."""
    for i in range(5):
        for k, p in enumerate(params):
            p.grad = numbers(10 * i + k, *p.shape)
        if i > 1:
            borrow()
        optimizer.step()
        world.see("weights", [p.detach() for p in params])
        world.see("state", optimizer.state_dict())


OVERLAPS = {"where": ALONE, "proves": False}


@deed(
    **OVERLAPS,
    case=CASES,
    pair=((0, 2), (2, 0), (1, 0), (1, 2)),
    size=SIZES,
    product=True,
    backward=LEFT,
)
def gradient_that_is_of_another_parameter(world, case, pair, size):
    by, what, way = case
    reader, owner = pair
    params, optimizer = three(world, by, size)

    def borrow():
        p = params[owner]
        params[reader].grad = way(p.detach() if what == "weight" else optimizer.state[p][STATE[by]])

    steps(world, params, optimizer, borrow)


@deed(**OVERLAPS, by=("SGD", "AdamW"))
def gradients_that_are_state_while_several_threads_update(world, by):
    """The tensor is the only user of its memory, and has two owners."""
    torch.set_num_threads(3)
    params, optimizer = three(world, by, 300)

    def borrow():
        for reader, owner in ((0, 1), (1, 2)):
            params[reader].grad = optimizer.state[params[owner]][STATE[by]]

    steps(world, params, optimizer, borrow)
    torch.set_num_threads(1)


@deed(**OVERLAPS)
def gradients_that_are_state_before_and_behind(world):
    params, optimizer = three(world, "Rprop")

    def borrow():
        state = [optimizer.state[p]["prev"].t() for p in params]
        params[1].grad, params[2].grad, params[0].grad = state

    steps(world, params, optimizer, borrow)


@deed(**OVERLAPS)
def gradients_and_state_side_by_side(world):
    """Parts of one buffer are no overlap."""
    params, optimizer = three(world, "SGD")

    def borrow():
        flat = torch.arange(36 * 6, dtype=torch.float32).div_(100)
        for i, p in enumerate(params):
            p.grad = flat[36 * i : 36 * (i + 1)].view(6, 6)
            optimizer.state[p]["momentum_buffer"] = flat[36 * (i + 3) : 36 * (i + 4)].view(6, 6)

    steps(world, params, optimizer, borrow)


@deed(**OVERLAPS)
def gradient_over_two_states(world):
    """Their parameters are before and behind it."""
    params, optimizer = three(world, "SGD")
    steps(world, params, optimizer, lambda: None)
    buffer, state = numbers(9, 12, 6), optimizer.state
    state[params[0]]["momentum_buffer"] = buffer[:6]
    state[params[2]]["momentum_buffer"] = buffer[6:]
    params[1].grad = buffer[3:9]
    world.refused(optimizer.step, way_out="before and after it: put its clone() there")
    world.see("weights", params)
    params[1].grad = buffer[3:9].clone()
    optimizer.step()
    world.see("weights", params)


@deed(**OVERLAPS, owner=(0, 1))
def state_that_is_another_parameter(world, owner):
    params, optimizer = three(world, "SGD")
    steps(world, params, optimizer, lambda: None)
    optimizer.state[params[1 - owner]]["momentum_buffer"] = params[owner].detach()
    words = "shares memory with the optimizer state of another"
    world.refused(optimizer.step, words, way_out="")
    world.see("weights", params)


@deed(**OVERLAPS, by=("Rprop", "SGD", "AdamW", "NAdam"))
def steps_of_several_threads(world, by):
    """They come one after the other; each looks who else writes to the memory of gradients. A
    class's own step() may run in several threads at once, as in stock."""
    params, optimizer = three(world, by, 20)
    for k, p in enumerate(params):
        p.grad = numbers(k, 20, 20)

    def run(n):
        for _ in range(n):
            optimizer.step()

    run(1)
    threads = [threading.Thread(target=run, args=(100,)) for _ in range(3)]
    for thread in threads if world.fused else ():
        thread.start()
    for thread in threads if world.fused else ():
        thread.join()
    run(0 if world.fused else 300)
    world.see("weights", params)
    world.see("state", optimizer.state_dict())


# ---- what an update reads and writes itself


def a_part_of_its_memory(p, state):
    whole = p.new_zeros(p.numel() + 1)
    whole[1:] = p.detach().view(-1)
    p.data = whole[1:].view(p.shape)
    return whole[:-1].view(p.shape), state


#: (gradient, state) that an update can't read before it writes the other.
WRITTEN = {
    "the parameter": lambda p, state: (p.detach(), state),
    "a part of its memory": a_part_of_its_memory,
    "the state": lambda p, state: (state.view(p.shape), state),
    "state, parameter": lambda p, state: (torch.ones_like(p), p.detach()),
}


def asgd(world):
    p, q = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), nn.Parameter(torch.ones(4))
    optimizer = world.wrap(optim.ASGD([q, p], lr=0.1))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    world.launch()
    return p, q, optimizer


@deed(**OVERLAPS, kind=WRITTEN, clips=BOOL, product=True)
def update_that_writes_what_it_reads(world, kind, clips):
    p, q, optimizer = asgd(world)
    p.grad, optimizer.state[p]["ax"] = kind(p, optimizer.state[p]["ax"])
    if clips and world.mode == "forward":
        optfuse.clip_grad_norm_(optimizer, 1e-3)
    before = [p.detach().clone(), q.detach().clone()]
    words = "of parameter 1 of group 0 ", "shares memory with"
    world.refused(optimizer.step, *words, way_out="")
    assert all(map(torch.equal, before, (p, q))), "they were updated"
    p.grad, optimizer.state[p]["ax"] = p.grad.clone(), optimizer.state[p]["ax"].clone()
    if not clips:
        optimizer.step()
    world.see("weights", None if clips else [p, q])


@deed(**OVERLAPS)
def gradient_and_state_beside_their_parameter(world):
    """One flat buffer for all three."""
    memory = torch.linspace(-1, 1, 36)
    p = nn.Parameter(memory[:12])
    optimizer = world.wrap(optim.ASGD([p], lr=0.1))
    for i in range(4):
        if i == 1:
            memory[12:24] = optimizer.state[p]["ax"]
            optimizer.state[p]["ax"] = memory[12:24]
        memory[24:] = i
        p.grad = memory[24:]
        optimizer.step()
        p.grad = None
        world.see("all", memory)


def rmsprop(p):
    return optim.RMSprop([p], momentum=0.9, centered=True, foreach=False)


@deed(**OVERLAPS, together=BOOL)
def two_states_in_one_memory(world, together):
    """Stock writes one before it reads the other."""
    p = nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer, flat = rmsprop(p), torch.zeros(12)
    p.grad = torch.ones(6)
    optimizer.step()
    state = optimizer.state[p]
    for i, name in enumerate(("grad_avg", "momentum_buffer")):
        state[name] = flat[6 * i : 6 * i + 6].copy_(state[name])
    world.wrap(optimizer)
    if together:
        state["grad_avg"] = state["momentum_buffer"]
        words = "two tensors of the optimizer state of parameter 0"
        world.refused(optimizer.step, words, way_out="")
    else:
        for _ in range(3):
            optimizer.step()
    world.see("all", [p, flat])
