# SPDX-License-Identifier: BSD-3-Clause
"""Runs a recipe several times, each time in a child that is forked after the framework has been
imported, and keeps what it has trained: `python drive.py JOBS`, a JSON file."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import sys
import traceback
from pathlib import Path

import torch

losses: list[bytes] = []
optimizers: list[torch.optim.Optimizer] = []
kept: list[torch.library.Library] = []


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def watch() -> None:
    """Each loss that backward() starts from, and each optimizer that the script makes."""
    backward, init = torch.Tensor.backward, torch.optim.Optimizer.__init__

    def noting_backward(self, *args, **kwargs):
        losses.append(bits(self.reshape(1)))
        return backward(self, *args, **kwargs)

    def noting_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        optimizers.append(self)

    torch.Tensor.backward = noting_backward
    torch.optim.Optimizer.__init__ = noting_init


def trained(names: dict) -> dict[str, bytes]:
    """By what a failing test calls it."""
    found = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            found[f"optimizer {i}, lr of group {j}"] = repr(group["lr"]).encode()
            for k, param in enumerate(group["params"]):
                name = f"optimizer {i}, group {j}, parameter {k}"
                found[name] = bits(param)
                for key, value in optimizer.state.get(param, {}).items():
                    found[f"{name}, {key}"] = bits(torch.as_tensor(value).reshape(-1))
    for name, value in names.items():
        if isinstance(value, torch.nn.Module):
            for key, tensor in value.state_dict().items():
                found[f"{name}.{key}"] = bits(tensor.reshape(-1))
    return found


def updates() -> list[tuple[str, int, int]]:
    """The mode of each optimizer, how many updates optfuse has made of it, and how many of them
    in step(). Raises optfuse.Error for one that is not fused."""
    optfuse = sys.modules.get("optfuse")
    if optfuse is None:
        return [("stock", 0, 0) for _ in optimizers]
    summaries = [optfuse.summary(optimizer) for optimizer in optimizers]
    return [(found.mode, found.created, found.in_step) for found in summaries]


def without_torchvisions_library() -> None:
    """PyPI's torchvision is built for CUDA, and beside another torch its library doesn't load. Its
    Python code is imported all the same where two operators have a name; no recipe calls them."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept.append(library)


def run(job: dict) -> None:
    watch()
    script = Path(job["script"])
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    sys.argv = [script.name, *job["arguments"]]
    made = runpy.run_path(str(script), run_name="__main__")
    found = {"updates": updates(), "losses": losses, "trained": trained(made)}
    Path(job["result"]).write_bytes(pickle.dumps(found))


def main(jobs: list[dict], modules: list[str]) -> int:
    torch.set_num_threads(1)
    if "timm" in modules and torch.version.cuda is None:
        without_torchvisions_library()
    # The first step() of any optimizer imports this, and each child would do so by itself.
    for module in ("torch._dynamo", *modules):
        importlib.import_module(module)
    for job in jobs:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(job)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"failed: {job['script']} {job['arguments']}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    sys.exit(main(told["jobs"], told["modules"]))
