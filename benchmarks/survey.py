# SPDX-License-Identifier: BSD-3-Clause
"""Section survey: whether optimizers of other packages train as they do by themselves when their
step() is recorded, and which of them are updated inside backward(): every class, in both modes, 50
steps of a small model, weights and state_dict() compared by bits after each. And whether final mode
trains as hooks do that step an optimizer for each parameter. Each class runs in a process of its
own.

    python -m pip install --target DIR pytorch_optimizer timm ...
    benchmarks/run --section survey --packages DIR"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import multiprocessing
import pkgutil
import re
import resource
import signal
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optfuse
from optfuse._link import link_of
from optfuse._updaters.recorded import Recorded

PACKAGES = ("pytorch_optimizer", "timm.optim", "torch_optimizer", "schedulefree")
PACKAGES += ("bitsandbytes.optim", "optimi", "lion_pytorch", "torchao.optim")
PACKAGES += ("adabelief_pytorch", "adan_pytorch", "galore_torch", "sophia_opt", "pytorch_ranger")
PACKAGES += ("madgrad", "came_pytorch", "apollo_torch", "torchium.optimizers", "heavyball")
PACKAGES += ("adv_optm",)
STEPS = 50
SECONDS = 60  # of the processor, for one class by itself
AHEAD, LEFT, RAISED = "equal, in backward()", "equal, left to step()", "raises in backward mode"
DIFFERENT, UNMADE = "different", "not run by itself"
FINAL, FINAL_RAISES, NO_HOOKS = "equal", "raises", "its hooks don't run by themselves"
Seen = dict[str, Any]


class Net(nn.Module):
    """An embedding, whose weights are those of a matrix, too, a convolution, a norm and another
    matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)
        self.tied = nn.Linear(8, 20, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.table(x)
        hidden = self.norm(self.conv(embedded.transpose(1, 2))).relu()
        return self.out(hidden.mean(2)) + self.tied(embedded).mean(1)[:, :4]


def without_models() -> None:
    """timm's optimizers need of its models one function, which none of them calls; the models
    need torchvision."""
    found = importlib.util.find_spec("timm")
    if found is not None:
        timm, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        timm.__path__ = list(found.submodule_search_locations or ())
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": timm, "timm.models": models})


def without_compiling() -> None:
    """heavyball compiles each function at its first call, which takes minutes a class."""
    if importlib.util.find_spec("heavyball") is not None:
        importlib.import_module("heavyball").utils.compile_mode = None


def modules(name: str) -> Iterator[types.ModuleType]:
    package = importlib.import_module(name)
    yield package
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            yield importlib.import_module(found.name)
        except (Exception, SystemExit) as error:
            print(f"  {found.name} is left out: {error}")


def classes(package: str) -> list[type[Optimizer]]:
    found = {v for module in modules(package) for v in vars(module).values() if inspect.isclass(v)}
    root = package.partition(".")[0]
    own = [v for v in found if issubclass(v, Optimizer) and v.__module__.split(".")[0] == root]
    return sorted(own, key=lambda cls: (cls.__name__, cls.__module__))


def made(cls: type[Optimizer], model: nn.Module) -> Optimizer:
    """With its defaults, as far as it has any and takes them."""
    params = list(model.parameters())
    for options in ({}, {"lr": 1e-3}, {"lr": 1e-3, "momentum": 0.9}):
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            return cls(params, **options)
    return cls(params)


def training(
    cls: type[Optimizer], wrap: Callable[[Optimizer, nn.Module], Optimizer], steps: bool = True
) -> Seen:
    """Every tensor's bits and everything else that each step leaves behind, by place. steps: by
    step(), and not by hooks of the parameters."""
    torch.manual_seed(0)
    model, seen = Net(), {}
    optimizer = made(cls, model)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    optimizer = wrap(optimizer, model)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        x = torch.randint(20, (6, 5), generator=random)
        y = torch.randint(4, (6,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if steps:
            optimizer.step()
        left = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if not steps:  # of which the hooks have options of their own
            left["optimizer"] = left["optimizer"]["state"]
        seen.update(parts(left, f"step {step + 1}"))
        del left  # backward mode leaves to step() what others have, too
    return seen


def with_hooks(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """The loop that a fused back pass takes the place of: step() of an optimizer for each parameter
    behind its gradient, by the options and with the state of the one that is kept."""

    def attach(param: Tensor, group: dict[str, Any]) -> None:
        alone = object.__new__(type(optimizer))
        alone.__dict__ = {**vars(optimizer), "param_groups": [{**group, "params": [param]}]}

        def update(param: Tensor) -> None:
            alone.step()
            param.grad = None

        param.register_post_accumulate_grad_hook(update)

    for group in optimizer.param_groups:
        for param in group["params"]:
            attach(param, group)
    return optimizer


def parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield name, (value.dtype, tuple(value.shape), bytes(flat.numpy()))
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from parts(item, f"{name}[{key!r}]")
    else:
        yield name, repr(value)


def first_difference(ours: Seen, stock: Seen) -> str | None:
    names = (n for n in {**stock, **ours} if n not in ours or n not in stock or ours[n] != stock[n])
    return next(names, None)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Limits this process by its own time: other work on the machine makes no class a slow one."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    signal.signal(signal.SIGXCPU, end)
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def judge(cls: type[Optimizer], send: Callable[[tuple[str, str] | None], None]) -> None:
    """Sends why the class by itself can't be compared with anything, or None, and then what
    kind of case it is and why."""
    warnings.simplefilter("ignore")
    try:
        with at_most(SECONDS):
            stock, again = (training(cls, lambda optimizer, _: optimizer) for _ in range(2))
    except Exception as error:
        return send((UNMADE, f"{type(error).__name__}: {error}"))
    if first_difference(stock, again):
        return send((UNMADE, "two runs of it differ"))
    send(None)
    send(compare(cls, stock))
    return send(compare_final(cls))


def compare(cls: type[Optimizer], stock: Seen) -> tuple[str, str]:
    """Both modes with the class by itself; what kind of case it is and why."""
    for mode in ("forward", "backward"):
        fused: list[Optimizer] = []

        def wrap(optimizer: Optimizer, _: nn.Module, mode: str = mode) -> Optimizer:
            fused.append(optfuse.fuse(optimizer, mode=mode))  # noqa: B023
            return fused[-1]  # noqa: B023

        try:
            difference = first_difference(training(cls, wrap), stock)
        except optfuse.Error as error:
            return (RAISED if mode == "backward" else DIFFERENT), str(error)
        except Exception as error:
            return DIFFERENT, f"{mode}: {type(error).__name__}: {error}"
        if difference is not None:
            return DIFFERENT, f"{mode}: {difference}"
    updater = link_of(fused[0]).updater
    if not isinstance(updater, Recorded) or updater.passes_ahead:
        return AHEAD, ""
    return LEFT, updater.why_left()


def compare_final(cls: type[Optimizer]) -> tuple[str, str]:
    """Final mode with hooks; what kind of case it is and why."""

    def wrap(optimizer: Optimizer, _: nn.Module) -> Optimizer:
        return optfuse.fuse(optimizer, optfuse.Backward(final=True))

    try:
        hooks, again = (training(cls, with_hooks, steps=False) for _ in range(2))
    except Exception as error:
        return NO_HOOKS, f"{type(error).__name__}: {error}"
    if first_difference(hooks, again):
        return NO_HOOKS, "two runs of it differ"
    try:
        difference = first_difference(training(cls, wrap, steps=False), hooks)
    except optfuse.Error as error:
        return FINAL_RAISES, str(error)
    except Exception as error:
        return DIFFERENT, f"final: {type(error).__name__}: {error}"
    return (FINAL, "") if difference is None else (DIFFERENT, f"final: {difference}")


def run_apart(cls: type[Optimizer]) -> list[tuple[str, str]]:
    """In a process of its own: what compare() and compare_final() give; one if there is nothing
    to compare with."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=judge, args=(cls, theirs.send))
    process.start()
    theirs.close()
    found: list[tuple[str, str]] = []
    try:
        if not ours.poll(10 * SECONDS):
            return [(UNMADE, "it waits for something")]
        said = ours.recv()
        if said is not None:
            return [said]
        for _ in range(2):
            ended = ours.poll(10 * SECONDS)
            found.append(ours.recv() if ended else (DIFFERENT, "it does not end"))
        return found
    except EOFError:
        return [*found, *[(DIFFERENT, "its process died")] * (2 - len(found))]
    finally:
        process.kill()
        process.join()


def short(why: str) -> str:
    """Reasons without the names in them, to count them."""
    why = re.sub(r"optfuse: can't (fuse|register) [\w.]+: ", "", why)
    why = why.replace("it was registered with per_parameter=True, but ", "")
    why = re.sub(r"(?<!\w)'[^']*'|\d+|\([\d, ]+\)", "_", why)
    return re.split(r"[.;](?:\s|$)", why)[0][:150]


def section(chosen: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    without_models()
    without_compiling()
    found: dict[str, tuple[str, str]] = {}
    final: dict[str, tuple[str, str]] = {}
    by_package: dict[str, Counter[str]] = {}
    for package in chosen.package or PACKAGES:
        try:
            every = classes(package)
        except ImportError as error:
            print(f"{package}: not installed here ({error})")
            continue
        counts = by_package[package] = Counter()
        for cls in every[:3] if chosen.smoke else every:
            name = f"{cls.__module__}.{cls.__qualname__}"
            (kind, why), *more = run_apart(cls)
            found[name] = kind, why
            counts[kind] += 1
            said = ""
            if more:
                final[name] = more[0]
                said = f"; final mode: {' '.join(more[0])[:300]}"
            print(f"{name}: {f'{kind} {why}'[:300]}{said}", flush=True)
    total = sum(by_package.values(), Counter())
    finals = Counter(kind for kind, _ in final.values())
    print("\n".join(f"{n} {kind}" for kind, n in total.items()))
    print("\n".join(f"{n} {kind} in final mode" for kind, n in finals.items()))
    raised = {name: short(why) for name, (kind, why) in found.items() if kind == RAISED}
    left = {name: short(why) for name, (kind, why) in found.items() if kind == LEFT}
    unmade = {name: short(why) for name, (kind, why) in found.items() if kind == UNMADE}
    return {
        "steps": STEPS,
        "classes": len(found),
        "counts": total,
        "by package": by_package,
        "final mode": finals,
        "different": {
            name: why
            for table in (found, final)
            for name, (kind, why) in table.items()
            if kind == DIFFERENT
        },
        "raises in final mode": {
            name: short(why) for name, (kind, why) in final.items() if kind == FINAL_RAISES
        },
        "in backward()": [name for name, (kind, _) in found.items() if kind == AHEAD],
        "left to step() because": Counter(left.values()),
        "left to step()": left,
        "raises in backward mode": raised,
        "not run by itself because": Counter(unmade.values()),
        "not run by itself": [*unmade],
    }
