# SPDX-License-Identifier: BSD-3-Clause
"""A class without kernels steps by itself, and its operators are recorded: what becomes of them,
and what fuse(), copies and summaries say. That each class has stock's bits, whatever is done with
it, is shown by deeds (programs/deeds/steps.py, programs/test_classes.py)."""

import copy
import gc
import threading
import time

import numpy as np
import pytest
import torch
from recorded_classes import KINDS, Base
from torch import nn
from torch.nn.utils import clip_grad_norm_

import optfuse
from optfuse._fused.recorded import last_counts
from optfuse._options import RECORDED

SHAPES = (3, 5), (4,), (2, 3, 2), (41,)


def stepped(cls, steps=4, fuse=optfuse.fuse):
    """A fused optimizer after some steps, and what takes another one."""
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = fuse(cls([{"params": params[:2]}, {"params": params[2:]}]))

    def step():
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()

    for _ in range(steps):
        step()
    return optimizer, step


@pytest.mark.parametrize("name", KINDS)
def test_versions_are_stocks(name):
    """In forward mode."""

    def versions(**how):
        torch.manual_seed(0)
        optimizer, _ = stepped(KINDS[name], **how)
        return [p._version for group in optimizer.param_groups for p in group["params"]]

    assert versions() == versions(fuse=lambda optimizer: optimizer)


def counts_of(optimizer):
    return last_counts(optimizer.__dict__[RECORDED])


@pytest.mark.parametrize("name", ["Elementwise", "OldStyle"])
def test_elementwise_lines_run_as_one_program_for_each_parameter(name):
    counts = counts_of(stepped(KINDS[name])[0])
    assert (counts["programs"], counts["operators"]) == (len(SHAPES), 0), counts


def test_booleans_between_operators_are_parts_of_programs():
    counts = counts_of(stepped(KINDS["Masks"])[0])
    # Those that stay, and what reads them.
    assert counts["operators"] == 2 * len(SHAPES), counts


def test_fuse_runs_none_of_the_classs_code_and_leaves_its_type():
    class Counts(Base):
        calls = 0

        def one(self, p, group, state):
            Counts.calls += 1

        def __getattr__(self, name):
            Counts.calls += 1
            raise AttributeError(name)

    optimizer = Counts([nn.Parameter(torch.ones(2))])
    Counts.calls = 0
    optfuse.fuse(optimizer)
    assert Counts.calls == 0
    assert type(optimizer) is Counts
    assert "recorded" in optfuse.explain(optimizer)
    with pytest.raises(optfuse.Error, match="already fused"):
        optfuse.fuse(optimizer)


def test_another_thread_inside_of_step_never_reads_old_numbers():
    """It raises, or waits; PyTorch's operators run where they are called."""
    seen = []

    class Threads(Base):
        def one(self, p, group, state):
            made = p.grad * 2

            def look():
                try:
                    seen.append(made.sum().item() == (p.grad.sum() * 2).item())
                except (optfuse.Error, RuntimeError):
                    seen.append("raised")

            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            p.sub_(made, alpha=group["lr"])

    stepped(Threads, 3)
    assert False not in seen


def test_a_copy_is_fused_with_its_options_and_a_pickle_is_stock():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.5)

    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Plain([p]), optfuse.Forward(max_grad_norm=1.0), [p])
    model = {"p": p, "optimizer": optimizer}
    twin = copy.deepcopy(model)
    twin["p"].grad = torch.full((3,), 9.0)
    twin["optimizer"].step()
    stock = nn.Parameter(torch.ones(3))
    stock.grad = torch.full((3,), 9.0)
    clip_grad_norm_([stock], 1.0)
    Plain([stock]).step()
    assert torch.equal(twin["p"], stock)
    assert torch.equal(p, torch.ones(3))
    assert optfuse.summary(twin["optimizer"]).eager == 1
    optfuse.unfuse(twin["optimizer"])
    assert not {"step", "__deepcopy__", "__getstate__"} & vars(twin["optimizer"]).keys()


def test_summary_and_explain_say_what_the_last_step_did():
    optimizer, _ = stepped(KINDS["Elementwise"])
    said = optfuse.summary(optimizer)
    assert (said.mode, said.parameters, said.pending) == ("forward", 4, 0)
    assert "4 programs and 0 operators" in said.own_step
    assert said.own_step in str(said)
    assert said.own_step in optfuse.explain(optimizer)
    optfuse.flush(optimizer)
    optfuse.drain(optimizer)
    optfuse.unfuse(optimizer)
    with pytest.raises(optfuse.Error, match="not fused"):
        optfuse.summary(optimizer)


def test_a_profilers_trace_has_the_lines_inside_of_the_step():
    _, step = stepped(KINDS["Norms"])
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events()]
    assert "optfuse::recorded" in names
    assert "Optimizer.step#Norms.step" in names


def test_fuse_takes_a_millisecond_and_a_look_at_the_parameters():
    params = [nn.Parameter(torch.ones(3)) for _ in range(1000)]
    times = []
    for _ in range(20):
        optimizer = KINDS["Elementwise"](params)
        gc.collect()
        begin = time.perf_counter()
        optfuse.fuse(optimizer)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3, min(times)


class ScalesAnArray(Base):
    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        self.arrays[p] *= np.float32(0.5)


@pytest.mark.parametrize("is_eager", (True, False))
def test_an_array_of_a_parameter_from_before_fuse_needs_eager(is_eager):
    def trained(is_fused):
        p = nn.Parameter(torch.ones(40))
        optimizer = ScalesAnArray([p])
        optimizer.arrays = {p: p.detach().numpy()}
        if is_fused:
            optfuse.fuse(optimizer, eager=[p] if is_eager else ())
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach()

    assert torch.equal(trained(True), trained(False)) == is_eager
