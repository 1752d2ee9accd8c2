# SPDX-License-Identifier: BSD-3-Clause
"""Runs variants of one script, each in a child that is forked after its packages have been
imported, and keeps what they have trained: `python play.py JOBS`, a JSON file. Where optfuse
raises, the result is its message."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pickle
import runpy
import sys
import traceback
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RECIPES = Path(__file__).resolve().parents[1] / "python" / "recipes"
sys.path.append(str(RECIPES))
import drive  # noqa: E402

Counted = list[tuple[str, str, int, int]]


def counted() -> Counted:
    """Class, mode, updates and those of them in step(), of each optimizer that is fused."""
    optfuse = sys.modules.get("optfuse")
    found = []
    for optimizer in drive.optimizers if optfuse else ():
        try:
            s = optfuse.summary(optimizer)
        except (optfuse.Error, TypeError):  # stock, inside of another one
            continue
        name = next(c for c in type(optimizer).__mro__ if c.__module__ != "optfuse").__name__
        found.append((name, s.mode, s.created, s.in_step))
    return found


def parameters(optimizer: torch.optim.Optimizer) -> list[bytes]:
    return [drive.bits(p) for group in optimizer.param_groups for p in group["params"]]


def why(error: BaseException) -> str | None:
    """The message of optfuse, also where a framework has wrapped it; None for any other error."""
    while error is not None:
        if type(error).__module__.split(".")[0] == "optfuse":
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def run(script: Path, result: Path, words: list[str]) -> None:
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    sys.argv = [script.name, *words]
    steps = []
    if "optfuse" not in script.read_text("utf-8").lower():  # a hook of all optimizers
        register_optimizer_step_post_hook(lambda *_: steps.append(None))
    drive.watch()
    try:
        made = runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        message = why(error)
        if message is None:
            raise
        traceback.print_exc()
        found = {"raises": message}
    else:
        drive.optimizers.sort(key=parameters)  # some packages make them in the order of a set
        trained = drive.trained(made)
        found = {"steps": len(steps), "losses": drive.losses, "trained": trained}
        found["updates"] = counted()
    result.write_bytes(pickle.dumps(found))


def import_packages(code: str) -> None:
    """All that the script imports, but for optfuse."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom) and "optfuse" not in ast.unparse(node):
            exec(ast.unparse(node), {})


def main(jobs: list[dict]) -> None:
    torch.set_num_threads(1)
    first = Path(jobs[0]["script"])
    sys.path.append(str(first.parent))  # digits.py
    importlib.import_module("torch._dynamo")  # by the first step() of any optimizer
    if torch.version.cuda is None and importlib.util.find_spec("torchvision"):
        drive.without_torchvisions_library()  # PyPI's is built for CUDA
    import_packages(first.read_text("utf-8"))
    for job in jobs:
        child = os.fork()
        if child == 0:
            with open(job["log"], "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                status = 1
                try:
                    run(Path(job["script"]), Path(job["result"]), job["words"])
                    status = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.waitpid(child, 0)  # without a result it has failed


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
