# SPDX-License-Identifier: BSD-3-Clause
"""Random programs on three streams that stock runs without a race, and only
just: with ours they are free of races too, and give the same bits."""

import functools

import pytest
import torch
from common import assert_same, fuse_with
from stream_programs import describe, draw, mended, run, wait

PROGRAMS, LENGTH = 60, 24
MODES = ("forward", "backward")


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def sgd(params):
    optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True)
    optimizer.step()  # stock can't do the first one of only some parameters
    return optimizer


class Mine(torch.optim.Optimizer):
    """Without kernels, and with no state but tensors on the GPU."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["m"].mul_(0.9).add_(p.grad)
            state["v"].addcmul_(p.grad, p.grad, value=0.1)
            p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-3), value=-0.1)


def fused(mode, **options):
    return lambda optimizer: fuse_with(optimizer, mode, **options)


@functools.cache
def in_order(mode, make):
    """The programs, each with what it gives with stock: all ways of a mode have the same ones."""
    return [mended(draw(mode, seed, LENGTH), make) for seed in range(PROGRAMS)]


def explain(program, outcome):
    return f"action {outcome.failed_at}: {outcome.races}\n{describe(program)}"


WAYS = {
    "forward": fused("forward"),
    "backward": fused("backward"),
    "side stream": fused("backward", side_stream=True),
}


@pytest.mark.parametrize("make", [adamw, Mine, pytest.param(sgd, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_in_order_with_stock_is_in_order_with_ours(way, make):
    mode, waits, ahead = "forward" if way == "forward" else "backward", 0, []

    def wrap(optimizer):
        ahead.append(WAYS[way](optimizer))
        return ahead[-1]

    for seed, (program, stock) in enumerate(in_order(mode, make)):
        waits += sum(kind is wait for kind, _, _ in program)
        ours = run(program, make, wrap)
        assert ours.failed_at is None, f"program {seed}, {explain(program, ours)}"
        assert_same(f"values of program {seed}\n{describe(program)}", ours.values, stock.values)
    assert waits > PROGRAMS, "hardly a program needed a wait: they prove nothing"
    if make is Mine and mode == "backward":
        assert sum(o._optfuse_link.updater.passes_ahead for o in ahead) > PROGRAMS


def test_without_our_waits_some_are_not(monkeypatch):
    """In backward mode none is needed: an update never outlives backward."""
    programs = [program for program, _ in in_order("forward", adamw)]
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "streams")
    racing = sum(run(p, adamw, fused("forward")).failed_at is not None for p in programs)
    assert racing > 0, f"none of {PROGRAMS} programs races without our waits"


def test_the_programs_are_of_every_kind():
    for mode in MODES:
        kinds = {kind.__name__ for seed in range(20) for kind, _, _ in draw(mode, seed, LENGTH)}
        assert len(kinds) > 6, f"{mode}: only {sorted(kinds)}"
