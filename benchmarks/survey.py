# SPDX-License-Identifier: BSD-3-Clause
"""Which optimizers of other packages fuse after register(), and whether they train as
they do by themselves: every class of each package, in both modes, a few steps of a
small model, weights and state_dict() compared by bits after each.

    python -m pip install --no-deps --target DIR pytorch_optimizer timm ...
    python benchmarks/survey.py --packages DIR [--out FILE] [PACKAGE ...]

A class runs in a process of its own, and in a minute by itself."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import multiprocessing
import pkgutil
import re
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optfuse
from optfuse._own_step.register import INDEPENDENT

PACKAGES = (
    "pytorch_optimizer",
    "timm.optim",
    "torch_optimizer",
    "schedulefree",
    "bitsandbytes.optim",
    "optimi",
    "lion_pytorch",
)
ABSENT = {"timm": ("timm.models",)}  # needs torchvision
MODES = ("forward", "backward")
STEPS = 8
SECONDS = 60  # for one class
EQUAL, REFUSED, DIFFERENT, UNMADE = "equal", "refused", "different", "not run by itself"
Seen = list[tuple[str, Any]]


@dataclass(frozen=True)
class Verdict:
    package: str
    name: str
    kind: str
    why: str = ""


class Net(nn.Module):
    """An embedding, a convolution, a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(self.table(x).transpose(1, 2))).relu()
        return self.out(hidden.mean(2))


# ---- finding them


class Absent(types.ModuleType):
    """Stands for what a package's optimizers import and do not need for a step."""

    def __getattr__(self, name: str) -> None:
        return None


def load(package: str) -> types.ModuleType:
    """If the whole does not import here, because it needs more packages, the part alone."""
    outer, _, inner = package.partition(".")
    try:
        return importlib.import_module(package)
    except Exception as error:
        spec = importlib.util.find_spec(outer)
        if not inner or spec is None or spec.submodule_search_locations is None:
            raise ImportError(str(error)) from error
    for name in [n for n in sys.modules if n.partition(".")[0] == outer]:
        del sys.modules[name]
    sys.modules[outer] = types.ModuleType(outer)
    sys.modules[outer].__path__ = list(spec.submodule_search_locations)
    for name in ABSENT.get(outer, ()):
        sys.modules[name] = Absent(name)
    return importlib.import_module(package)


def modules(package: types.ModuleType) -> Iterator[types.ModuleType]:
    yield package
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            yield importlib.import_module(found.name)
        except (Exception, SystemExit) as error:
            print(f"  {found.name} is left out: {error}")


def classes(package: str) -> list[type[Optimizer]]:
    root = package.partition(".")[0]
    found = {
        value
        for module in modules(load(package))
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Optimizer)
    }
    own = [cls for cls in found if cls.__module__.partition(".")[0] == root]
    return sorted(own, key=lambda cls: (cls.__name__, cls.__module__))


# ---- running one


def made(cls: type[Optimizer], model: nn.Module) -> Optimizer:
    """With its defaults, as far as it has any and takes them."""
    params = list(model.parameters())
    options: dict[str, Any]
    for options in ({}, {"lr": 1e-3}, {"lr": 1e-3, "momentum": 0.9}):
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            return cls(params, **options)
    return cls(params)


def training(cls: type[Optimizer], wrap: Callable[[Optimizer], Optimizer]) -> Iterator[Any]:
    """Everything that a step leaves behind."""
    torch.manual_seed(0)
    model = Net()
    optimizer = made(cls, model)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    optimizer = wrap(optimizer)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        x = torch.randint(20, (6, 5), generator=random)
        y = torch.randint(4, (6,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Its tensors' bits and everything else, each with its place."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield name, (value.dtype, tuple(value.shape), bytes(flat.numpy()))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from parts(item, f"{name}[{i}]")
    else:
        yield name, repr(value)


def seen(run: Iterator[Any]) -> Seen:
    return [
        (f"step {i + 1}{name}", part) for i, all_ in enumerate(run) for name, part in parts(all_)
    ]


def first_difference(ours: Seen, stock: Seen) -> str | None:
    theirs, mine = dict(stock), dict(ours)
    for name in (*theirs, *mine):
        if name not in mine or name not in theirs or mine[name] != theirs[name]:
            return name
    return None


def run_by_itself(cls: type[Optimizer]) -> Seen | str:
    """What it does, or why that can't be compared with anything."""
    try:
        stock = seen(training(cls, lambda optimizer: optimizer))
        if first_difference(seen(training(cls, lambda optimizer: optimizer)), stock):
            return "two runs of it differ"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return stock


def judge(cls: type[Optimizer], stock: Seen) -> tuple[str, str]:
    """What kind of case it is, and why."""
    try:
        if cls not in INDEPENDENT:
            optfuse.register(cls)
        for mode in MODES:
            fused = training(cls, lambda optimizer, mode=mode: optfuse.fuse(optimizer, mode=mode))
            difference = first_difference(seen(fused), stock)
            if difference is not None:
                return DIFFERENT, f"{mode}: {difference}"
    except optfuse.Error as error:
        return REFUSED, str(error)
    except Exception as error:
        return DIFFERENT, f"{type(error).__name__}: {error}"
    return EQUAL, ""


def run_apart(cls: type[Optimizer]) -> tuple[str, str]:
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        warnings.simplefilter("ignore")
        stock = run_by_itself(cls)
        theirs.send((UNMADE, stock) if isinstance(stock, str) else None)
        if not isinstance(stock, str):
            theirs.send(judge(cls, stock))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return UNMADE, f"it takes more than {SECONDS} s"
        first = ours.recv()
        if first is not None:
            return first
        return ours.recv() if ours.poll(10 * SECONDS) else (DIFFERENT, "it does not end")
    except EOFError:
        return DIFFERENT, "its process died"
    finally:
        process.kill()
        process.join()


# ---- the answer


def short(why: str) -> str:
    """Reasons without the names in them, to count them."""
    why = re.sub(r"^(forward|backward): ", "", why)
    why = re.sub(r"optfuse: can't (fuse|register) [\w.]+: ", "", why)
    why = why.replace("it was registered with per_parameter=True, but ", "")
    why = re.sub(r"(?<!\w)'[^']*'|\d+|\([\d, ]+\)", "_", why)
    return re.split(r"[.;](?:\s|$)", why)[0][:150]


def survey(names: list[str]) -> list[Verdict]:
    verdicts = []
    for package in names:
        try:
            found = classes(package)
        except ImportError as error:
            print(f"{package}: not installed here ({error})")
            continue
        mine = [Verdict(package, cls.__qualname__, *run_apart(cls)) for cls in found]
        counts = Counter(verdict.kind for verdict in mine)
        print(
            f"{package}: {len(mine)} classes, " + ", ".join(f"{n} {k}" for k, n in counts.items())
        )
        for verdict in mine:
            print(f"  {verdict.name}: {verdict.kind} {verdict.why}"[:400], flush=True)
        verdicts += mine
    return verdicts


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "steps": STEPS,
        "classes": len(verdicts),
        "counts": Counter(v.kind for v in verdicts),
        "by package": {
            package: Counter(v.kind for v in verdicts if v.package == package)
            for package in dict.fromkeys(v.package for v in verdicts)
        },
        "refused because": Counter(short(v.why) for v in verdicts if v.kind == REFUSED),
        "different": [asdict(v) for v in verdicts if v.kind == DIFFERENT],
        "equal": [f"{v.package}.{v.name}" for v in verdicts if v.kind == EQUAL],
        "refused": {f"{v.package}.{v.name}": short(v.why) for v in verdicts if v.kind == REFUSED},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="where they are installed, if not here")
    parser.add_argument("--out", type=Path, help="a file for the summary")
    parser.add_argument("names", nargs="*", default=PACKAGES, metavar="PACKAGE")
    given = parser.parse_args()
    if given.packages:
        sys.path.append(str(given.packages))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = summary(survey(list(given.names)))
    text = json.dumps(found, indent=1)
    print("\n".join(f"{n} {kind}" for kind, n in found["counts"].items()))
    for why, n in found["refused because"].most_common():
        print(f"{n:4} refused: {why}")
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
