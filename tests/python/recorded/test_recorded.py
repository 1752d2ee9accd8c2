# SPDX-License-Identifier: BSD-3-Clause
"""A step() that is recorded gives stock's bits: each kind of class, whatever is done with it."""

import copy
import ctypes
import io
import threading

import pytest
import torch
from common import differing
from recorded_classes import KINDS, Base

import optfuse
from optfuse._fused.recorded import last_counts
from optfuse._options import RECORDED

DEEDS = {}
SHAPES = (3, 5), (4,), (2, 3, 2), (41,)


def deed(function):
    DEEDS[function.__name__] = function
    return function


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, (bool, int, float)):
        yield torch.tensor(float(value), dtype=torch.float64)


class World:
    """A small training, of which everything is compared."""

    notes_versions = True

    def __init__(self, cls, fused, dtype=torch.float32):
        torch.manual_seed(0)
        self.fused = fused
        self.params = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
        self.optimizer = self.fuse(cls([{"params": self.params[:2]}, {"params": self.params[2:]}]))
        self.noted = []

    def fuse(self, optimizer):
        return optfuse.fuse(optimizer, recorded=True) if self.fused else optimizer

    def note(self, value):
        self.noted += [x.detach().clone() for x in tensors_of(value)]

    def gradients(self, i, params=None):
        torch.manual_seed(i + 1)
        for p in params or self.params:
            p.grad = torch.randn(p.shape).to(p.dtype)

    def loss(self):
        self.optimizer.zero_grad()
        loss = sum((p * p).sum() for p in self.params)
        loss.backward()
        return loss

    def steps(self, n, begin=0):
        for i in range(begin, begin + n):
            self.gradients(i)
            self.note(self.optimizer.step())

    def end(self):
        self.note([self.params, list(self.optimizer.state.values())])
        self.note([p.grad for p in self.params if p.grad is not None])
        self.note([p._version for p in self.params if self.notes_versions])
        self.note([getattr(self.optimizer, "seen", []), torch.randn(2)])
        return self.noted


def compare(cls, work, make=None, **how):
    found = []
    for fused in (False, True):
        world = (make or World)(cls, fused, **how)
        work(world)
        found.append(world.end())
    stock, ours = found
    assert len(stock) == len(ours)
    pairs = zip(ours, stock, strict=True)
    different = [i for i, (a, b) in enumerate(pairs) if differing(a, b).any()]
    assert not different, f"{len(different)} of {len(stock)} values differ, from {different[0]} on"


@deed
def only_steps(world):
    world.steps(6)


@deed
def closures(world):
    for _ in range(4):
        world.note(world.optimizer.step(world.loss))


@deed
def missing_gradients(world):
    for i in range(6):
        world.gradients(i)
        world.params[i % 3].grad = None
        world.optimizer.step()


@deed
def other_options(world):
    for i in range(6):
        world.optimizer.param_groups[i % 2]["lr"] *= 0.7
        world.steps(1, i)


@deed
def a_checkpoint(world):
    world.steps(3)
    file = io.BytesIO()
    torch.save(world.optimizer.state_dict(), file)
    file.seek(0)
    world.optimizer.load_state_dict(torch.load(file))
    world.steps(3, 3)


@deed
def a_copy(world):
    world.steps(2)
    twin = copy.deepcopy(world.optimizer)
    params = [p for g in twin.param_groups for p in g["params"]]
    world.gradients(9, params)
    twin.step()
    world.note(params)
    world.steps(2, 2)


@deed
def hooks(world):
    world.optimizer.register_step_pre_hook(lambda o, *_: world.note(world.params))
    world.optimizer.register_step_post_hook(lambda o, *_: world.note(world.params))
    world.steps(4)


@deed
def schedulers(world):
    made = [torch.optim.lr_scheduler.ExponentialLR(world.optimizer, 0.9) for _ in range(2)]
    for i in range(4):
        world.steps(1, i)
        for scheduler in made:
            scheduler.step()


@deed
def unfused_and_fused_again(world):
    world.steps(2)
    if world.fused:
        optfuse.unfuse(world.optimizer)
    world.steps(2, 2)
    world.fuse(world.optimizer)
    world.steps(2, 4)


@deed
def one_more_group(world):
    world.steps(2)
    world.params.append(torch.nn.Parameter(torch.ones(6)))
    world.optimizer.add_param_group({"params": world.params[-1:]})
    world.steps(3, 2)


@deed
def gradients_in_one_memory(world):
    """As DistributedDataParallel has them."""
    for i in range(4):
        torch.manual_seed(i)
        flat, at = torch.randn(sum(p.numel() for p in world.params)), 0
        flat = flat.to(world.params[0].device)
        for p in world.params:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        world.optimizer.step()
        world.note(flat)


@deed
def other_strides(world):
    if type(world.optimizer).__name__ != "Views":  # which view() can't have
        for p in world.params:
            p.data = p.data.movedim(0, -1).contiguous().movedim(-1, 0)
    world.steps(4)


@deed
def another_thread(world):
    world.steps(2)
    thread = threading.Thread(target=world.steps, args=(3, 2))
    thread.start()
    thread.join()


@deed
def inference(world):
    world.steps(2)
    if type(world.optimizer).__name__ != "Addresses":  # .data = raises in stock
        with torch.inference_mode():
            world.gradients(5)
            world.note(world.params)
    world.steps(2, 6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("work", DEEDS)
def test_each_kind_of_class_has_stocks_bits_whatever_is_done(name, work):
    compare(KINDS[name], DEEDS[work])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", [k for k in KINDS if k not in ("Looks", "Addresses", "KeepsAnAddress")]
)
def test_each_kind_of_class_has_stocks_bits_in_other_dtypes(name, dtype):
    compare(KINDS[name], only_steps, dtype=dtype)


def counts_after(cls, steps=4):
    world = World(cls, fused=True)
    world.steps(steps)
    return last_counts(world.optimizer.__dict__[RECORDED])


@pytest.mark.parametrize("name", ["Elementwise", "OldStyle"])
def test_elementwise_lines_run_as_one_program_for_each_parameter(name):
    counts = counts_after(KINDS[name])
    assert (counts["programs"], counts["operators"]) == (len(SHAPES), 0), counts


def test_booleans_between_operators_are_parts_of_programs():
    counts = counts_after(KINDS["Masks"])
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

    optimizer = Counts([torch.nn.Parameter(torch.ones(2))])
    Counts.calls = 0
    optfuse.fuse(optimizer, recorded=True)
    assert Counts.calls == 0
    assert type(optimizer) is Counts
    assert "recorded" in optfuse.explain(optimizer)
    with pytest.raises(optfuse.Error, match="already fused"):
        optfuse.fuse(optimizer, recorded=True)


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_came_before_an_exception_has_happened(raised):
    class Raises(Base):
        def one(self, p, group, state):
            state["m"].add_(p.grad)
            p.sub_(state["m"], alpha=group["lr"])
            if self.n == 3 and p.dim() == 3:
                raise raised("in the middle")

    def work(world):
        world.steps(2)
        with pytest.raises(raised, match="in the middle"):
            world.steps(1, 2)
        world.note(world.params)
        world.steps(2, 3)

    compare(Raises, work)
    later = torch.ones(3).mul_(2)
    assert later.tolist() == [2, 2, 2]


def test_memory_that_is_read_by_its_address_has_new_numbers():
    class Reads(Base):
        def one(self, p, group, state):
            state["m"].add_(p.grad)
            first = ctypes.cast(state["m"].data_ptr(), ctypes.POINTER(ctypes.c_float))
            state["m"].mul_(0.5)
            first[0] += 1.0
            p.sub_(state["m"], alpha=group["lr"])
            self.seen.append(first[0])

    compare(Reads, only_steps)


def test_what_torch_compile_made_inside_of_step_reads_new_numbers():
    @torch.compile(backend="eager")
    def update(p, m, lr):
        m.mul_(0.5)
        return p - m * lr

    class Compiles(Base):
        def one(self, p, group, state):
            state["m"].add_(p.grad)
            p.copy_(update(p, state["m"], group["lr"]))

    compare(Compiles, only_steps)


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

    World(Threads, fused=True).steps(3)
    assert False not in seen
