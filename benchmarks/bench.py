# SPDX-License-Identifier: BSD-3-Clause
"""Trains real models on real data with every implementation of the optimizer, interleaved in one
process, and says what optfuse saves. Each section writes one small summary."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import any_optimizer
import captured
import compare
import convergence
import delay
import distributed
import forecast
import kernels
import kfac
import launch
import memory
import muon
import paper
import pipeline_flush
import pipeline_plan
import pipeline_run
import pipeline_sleep
import promised_gradients
import reorder
import rounding
import small
import stale
import start
import survey
import torch
import trips
from cells import MODELS, OPTIMIZERS
from data import handwritten
from figures import title
from summary_text import as_text

import optfuse

# Each prints what it finds and returns its figures, or None.
SECTIONS = {
    "cells": compare.cells,
    "grid": compare.grid,
    "captured": captured.section,
    "forecast": forecast.section,
    "small": small.section,
    "kernels": kernels.section,
    "memory": memory.section,
    "launch": launch.section,
    "start": start.section,
    "trips": trips.section,
    "rounding": rounding.section,
    "promises": promised_gradients.section,
    "muon": muon.section,
    "paper": paper.section,
    "survey": survey.section,
    "recorded": any_optimizer.section,
    "distributed": distributed.section,
    "reorder": reorder.section,
    "kfac": kfac.section,
    "convergence": convergence.section,
    "delay": delay.section,
    "pipeline-plan": pipeline_plan.section,
    "pipeline-flush": pipeline_flush.section,
    "pipeline-run": pipeline_run.section,
    "pipeline-sleep": pipeline_sleep.section,
}
USUAL = {"cpu": ("cells", "memory", "launch"), "cuda": ("cells", "memory", "kernels")}
SMOKE = ("cells", "memory", "kernels")
OF_ANY_OPTIMIZER = (
    "muon",
    "paper",
    "survey",
    "recorded",
    "start",
    "trips",
    "promises",
    "rounding",
    "kernels",
    "reorder",
    "kfac",
    "convergence",
    "delay",
    "pipeline-plan",
    "pipeline-flush",
    "pipeline-run",
    "pipeline-sleep",
)
HELP = """sections:
  cells    the usual cells: stock's implementations, a compiled step(), Python hooks, ours
  grid     five models, three batches each, and the floor: an update's bytes alone
  captured whole iterations in CUDA graphs, buckets of backward, memory of side streams; --more
  forecast cells of captured on an H200, by a model of launches and bytes: it measures nothing
  small    nets of microseconds: plain, with clipping, with an average; 1 and 2 threads
  kernels  the update alone: every optimizer against stock and the floor
  memory   peak memory of tensors and of the whole process
  launch   instructions of the host around an update, for a CPU and for a GPU
  start    milliseconds before a script trains: imports, an optimizer, fuse()
  trips    Python functions that an iteration enters, and its calls of the library
  rounding an update of bfloat16 that is rounded stochastically
  promises thin linear layers whose gradients are promises, under two policies of memory
  muon     step() of torch.optim.Muon over equal small matrices
  paper    the experiments of arXiv 2104.00237: batch size, the optimizer's share, layers, traffic
  survey   optimizers of other packages, recorded: equal to stock, and where; see --packages
  recorded step() of ten classes of another package, by itself and recorded; see --packages
  distributed  two processes under DistributedDataParallel over a slow link; see --fsdp
  reorder  the same, with weight gradients in another order
  kfac     K-FAC: its messages behind a slow link, the paper's schemes, what steps cost
  convergence  steps to a fixed loss: SGD, AdamW, Muon, and K-FAC
  delay    accuracy with late updates, and what they cost in one process
  pipeline-plan  simulated gains of layer pipelines over PipeDream, 2 to 9 processes
  pipeline-flush  simulated pipelines without delays, beside torch.distributed.pipelining's
  pipeline-run  seconds a batch of each strategy, on two processes
  pipeline-sleep  the schedules of pipeline-flush on four processes whose tasks sleep"""
ROOT = Path(__file__).resolve().parent.parent
COMMIT = f"git -C {ROOT} describe --always --exclude=* --dirty=+ 2>/dev/null || echo unknown"
SETTINGS = ("device", "optimizer", "model", "seconds", "rounds", "quick")


def machine() -> dict[str, Any]:
    """The facts that the figures depend on; nothing that names the machine."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    optimizer = optfuse.fuse(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "cuda": torch.version.cuda or "none",
        "cpu": cpu[1] if cpu else platform.machine(),
        "commit": subprocess.getoutput(COMMIT),  # a + where files have changed since
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "optfuse": optfuse.__version__,
        "optfuse_isa": optfuse.summary(optimizer).isa["float32"],
    }


def summary(section: str, found: dict[str, Any], settings: dict[str, Any]) -> str:
    head = {"section": section, "machine": machine(), "settings": settings}
    return as_text({**head, **found})


def write(text: str, path: Path) -> bool:
    """Prints a text that can't be written to the file: it took minutes to measure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        title(f"{path} can't be written ({error.strerror}). Its text is:\n{text}")
        return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks/run", description=__doc__, epilog=HELP)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    there = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--section", action="append", choices=SECTIONS, help="default: some of them")
    add("--quick", action="store_true", help="less of each, some minutes")
    add("--smoke", action="store_true", help="too little of each to tell much")
    add("--device", choices=USUAL, default=there, help="default: a GPU where there is one")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--model", action="append", choices=MODELS, help="only this one; may be repeated")
    add("--batch-from", type=int, default=0, help="only cells of at least so many")
    add("--seconds", type=float, help="for each of the usual cells; default 40, quick 12")
    add("--rounds", type=int, help="of each cell or case, at most")
    add("--budget", type=float, default=math.inf, help="seconds; then no other cell begins")
    compiled = "what torch.compile makes, too; default: unless --quick or --smoke"
    add("--more", action="store_true", help="captured: other models and other trainings")
    add("--compiled", action=argparse.BooleanOptionalAction, help=compiled)
    add("--threads", type=int, help="of PyTorch; default: as it chooses")
    add("--packages", type=Path, default="", help="where DeepSpeed, JAX or the survey's are")
    add("--case", metavar="REGEX", help="promises: cases so named, wide ones, too")
    add("--package", action="append", help="survey: only this one; may be repeated")
    add("--gbit", type=float, default=2.5, help="distributed: Gbit/s of the link, %(default)s")
    add("--fsdp", action="store_true", help="distributed: under fully_shard, too")
    add("--out", type=Path, default=Path(__file__).parent / "out", help="for the summaries")
    add("--stale", action="store_true", help="only print how old the figures in results are")
    add("--raw", type=Path, metavar="FILE", help="also write every round of cells and grid there")
    chosen = parser.parse_args()
    if chosen.raw and chosen.raw.resolve().is_relative_to(ROOT):
        parser.error("--raw: name a file outside of the tree, which keeps no raw rounds")
    chosen.until = time.monotonic() + chosen.budget
    chosen.seconds = chosen.seconds or (0.5 if chosen.smoke else 12.0 if chosen.quick else 40.0)
    chosen.section = chosen.section or list(SMOKE if chosen.smoke else USUAL[chosen.device])
    if chosen.compiled is None:
        chosen.compiled = not (chosen.quick or chosen.smoke)
    chosen.raw_rounds = {}
    sys.path.append(str(chosen.packages))
    return chosen


def describe(chosen: argparse.Namespace) -> None:
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    if os.getloadavg()[0] > 0.5:
        print(f"Other programs are running (load {os.getloadavg()[0]:.1f}): expect wide intervals.")
    print(f"{chosen.optimizer}, float32. docs/performance.md says what the columns are.")
    if handwritten() is None:
        print("scikit-learn is missing: the images are invented.")


def file_of(chosen: argparse.Namespace, section: str) -> Path:
    """Named for what the figures depend on, but for the machine."""
    words = [section] if section in OF_ANY_OPTIMIZER else [section, chosen.optimizer]
    words += ["cuda"] if chosen.device == "cuda" else []
    words += ["1-thread"] if torch.get_num_threads() == 1 and section != "survey" else []
    words += [model.lower() for model in chosen.model or ()]
    return chosen.out / ("-".join(words) + ".json")


def main() -> None:
    chosen = arguments()
    if chosen.stale:
        print(stale.table())
        return
    began = time.monotonic()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    describe(chosen)
    settings: dict[str, Any] = {name: getattr(chosen, name) for name in SETTINGS}
    written = []
    try:
        for name in (name for name in SECTIONS if name in chosen.section):
            found = SECTIONS[name](chosen)
            if found is not None:
                written.append(write(summary(name, found, settings), file_of(chosen, name)))
    finally:  # of the cells that were measured
        if chosen.raw:
            written.append(write(json.dumps(chosen.raw_rounds), chosen.raw))
    if not all(written):
        sys.exit(
            "\nerror: not all could be written, and the texts above are all there is: name another "
            "place by --out and --raw, or make room, before you measure again"
        )
    title(f"{time.monotonic() - began:.0f} s; summaries in {chosen.out}")


if __name__ == "__main__":
    main()
