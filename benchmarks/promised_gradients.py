# SPDX-License-Identifier: BSD-3-Clause
"""Section promises: thin linear layers whose weights' gradients are promises, beside fused=True,
beside fusion without promises, and beside whole steps that are compiled (peers.py). Each case
trains in a process of its own, once with glibc's malloc as it is and once where malloc keeps all
memory that was freed."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import peers
import torch
from compare import in_time
from figures import FUSED, columns, progress, title
from promised_gradients_cases import ALL, CASES, PLAIN, QUICK, SMOKE, Case, training
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import optfuse
from optfuse_tools.ab.interval import Interval, median_interval
from optfuse_tools.ab.variants import Wrap

# By default glibc maps each block above 32 MB anew and returns it when it is freed.
KEEPING = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
POLICIES = {"default malloc": "", "memory kept": KEEPING}
KINDS = {
    "backward fusion": ("backward", "off"),
    "forward fusion": ("forward", "off"),
    "backward, promises": ("backward", "auto"),
    "forward, promises": ("forward", "auto"),
}
#: Why a gradient is no promise, for reasons that stay (shim/promises/layer.cpp).
FINAL = ("panels have other bits here", "panels are slower here", "the gradient was looked at")
ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 25, 7, 2
SETTLE, QUICK_SETTLE, SMOKE_SETTLE = 90.0, 20.0, 0.2  # seconds of training for the trials
TENTH, BEFORE = "tenth iteration", 9
#: Iterations of a new process, trials and all; how often each kind runs them.
FIRST, FIRST_ROUNDS, SMOKE_FIRST = 60, 5, 3


# In a process of its own


def fused(case: Case, kind: str, made: dict[str, Optimizer], optimizer: Optimizer) -> Optimizer:
    mode, products = KINDS[kind]
    how = optfuse.Forward() if mode == "forward" else optfuse.Backward(accumulate=case.passes)
    made[kind] = optfuse.fuse(optimizer, how, products=products)
    return made[kind]


def variants(case: Case, made: dict[str, Optimizer]) -> dict[str, Wrap]:
    """By kind; each optimizer that is fused goes into `made`."""
    kinds = [kind for kind in KINDS if kind.startswith("forward") or case.in_backward]
    ours = {kind: partial(fused, case, kind, made) for kind in kinds}
    return {FUSED: lambda optimizer: optimizer, **ours}


def is_promising(kind: str) -> bool:
    return kind in KINDS and KINDS[kind][1] != "off"


def settle(case: Case, limit: float) -> float:
    """Trains until each layer has the verdict of its trial, which the whole process knows from
    then on. Returns the seconds that this took, at most the limit."""
    made: dict[str, Optimizer] = {}
    iterate = training(case, partial(fused, case, "forward, promises", made))
    (optimizer,) = made.values()
    began, whole = time.perf_counter(), list[int]()
    while time.perf_counter() - began < limit:
        for _ in case.rows:
            iterate()
        layers, before = optfuse.summary(optimizer).promised, whole
        whole = [layer.whole for layer in layers]
        known = [layer.because in FINAL for layer in layers]
        if before and all(k or w == b for k, w, b in zip(known, whole, before, strict=True)):
            break
    optfuse.flush()
    return time.perf_counter() - began


def promised(kind: str, made: dict[str, Optimizer], steps: int) -> dict[str, Any]:
    """Gradients of large layers' weights since fuse(): how many there were, how many the update
    computed part by part, how many somebody looked at, and why others were whole. `share`: of the
    bytes of all parameters, those that were updated without a gradient in memory."""
    if not is_promising(kind):
        return {}
    optimizer = made[kind]
    layers = optfuse.summary(optimizer).promised
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    never = sum(layer.panels * elements(layer.label) for layer in layers)
    return {
        "gradients": sum(layer.promised + layer.whole for layer in layers),
        "never_in_memory": sum(layer.panels for layer in layers),
        "looked_at": sum(layer.made for layer in layers),
        "others": "; ".join(sorted({layer.because for layer in layers if layer.because})),
        "share": never / (steps * sum(p.numel() for p in parameters)),
    }


def elements(label: str) -> int:
    """From the shape that ends a parameter's label."""
    return math.prod(map(int, re.findall(r"\d+", label.rpartition("shape")[2])))


def speed(case: Case, rounds: int, seconds: float, limit: float, compiles: bool) -> dict[str, Any]:
    settled = settle(case, limit)
    made: dict[str, Optimizer] = {}
    compared = optfuse.ab(
        partial(training, case),
        variants={**variants(case, made), **(peers.peers(compiles) if case.has_peers else {})},
        rounds=rounds,
        iterations=case.iterations,
        seconds=seconds,
        progress=lambda message: progress(f"{case}: {message}"),
    )
    kinds = {}
    for row in compared.rows:
        if row.note:
            raise RuntimeError(f"{row.name}: {row.note}")
        kinds[row.name] = {
            "ms": row.ms,
            "against_fused": row.speed,
            "equal_bits": row.equal_bits,
            "faults": row.page_faults,
            **promised(row.name, made, compared.steps),
        }
    return {"settled_s": settled, "rounds": compared.settings["rounds"], "kinds": kinds}


def peak(case: Case, kind: str, limit: float) -> dict[str, Any]:
    """The most MB of tensors in the tenth iteration, parameters and state included."""
    if is_promising(kind):
        settle(case, limit)
        gc.collect()
    made: dict[str, Optimizer] = {}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        iterate = training(case, variants(case, made)[kind])
        for _ in range(BEFORE):
            iterate()
        with record_function(TENTH):
            iterate()
        optfuse.flush()
    events = profiler.profiler.kineto_results.events()
    began = next(e.start_ns() for e in events if e.name() == TENTH)
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    levels = zip(sizes, accumulate(size for _, size in sizes), strict=True)
    most = max(level for (at, _), level in levels if at >= began)
    return {"tensors_mb": most / 1e6, **promised(kind, made, BEFORE + 1)}


def first(case: Case, kind: str, iterations: int) -> dict[str, list[float]]:
    """Milliseconds of each of the first iterations of this process, in turn with fused=True's."""
    made = variants(case, {})
    ms: dict[str, list[float]] = {name: [] for name in (FUSED, kind)}
    iterates = {name: training(case, made[name]) for name in ms}
    for _ in range(iterations):
        for name, iterate in iterates.items():
            began = time.perf_counter()
            iterate()
            ms[name].append((time.perf_counter() - began) * 1e3)
    return ms


# In the benchmark


def alone(
    packages: Path | str, policy: str, function: str, case: Case, *args: Any
) -> dict[str, Any]:
    """The result of this function in a new process under this policy of memory."""
    environment = {**os.environ, "GLIBC_TUNABLES": POLICIES[policy]}
    spec = json.dumps([str(packages), function, torch.get_num_threads(), str(case), *args])
    command = [sys.executable, __file__, spec]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{function} of {case} failed; what it said is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(case: Case, policy: str, found: dict[str, Any]) -> str:
    rows = [("", "ms an iteration", "x fused", "faults", "never in memory", "of the bytes")]
    for kind, one in found["kinds"].items():
        ms, ratio = (str(Interval(**one[key])) for key in ("ms", "against_fused"))
        counts = f"{one['never_in_memory']} of {one['gradients']}" if "gradients" in one else ""
        share = f"{one['share']:.0%}" if "share" in one else ""
        differs = "" if one["equal_bits"] else " (weights differ)"
        rows.append((kind + differs, ms, ratio, f"{one['faults']:.0f}", counts, share))
    reasons = sorted({one["others"] for one in found["kinds"].values() if one.get("others")})
    head = f"{case}, {policy}: {found['rounds']} rounds, trials waited {found['settled_s']:.0f} s"
    return "\n".join([head, columns(rows), *(f"other gradients: {why}" for why in reasons)])


def of_first(
    packages: Path | str, policy: str, case: Case, rounds: int, count: int
) -> dict[str, dict[str, Interval]]:
    """The sums of the first iterations, trials and all, each round in a process of its own."""
    found = {}
    for kind in filter(is_promising, variants(case, {})):
        sums = []
        for _ in range(rounds):
            ms = alone(packages, policy, "first", case, kind, count)
            sums.append((sum(ms[FUSED]), sum(ms[kind])))
        found[kind] = {
            "ms": median_interval([own / count for _, own in sums]),
            "against_fused": median_interval([stock / own for stock, own in sums]),
        }
    return found


def section(chosen: Any) -> dict[str, Any]:
    cases, rounds, limit = CASES, ROUNDS, SETTLE
    if chosen.quick:
        cases, rounds, limit = QUICK, QUICK_ROUNDS, QUICK_SETTLE
    if chosen.smoke:
        cases, rounds, limit = SMOKE, SMOKE_ROUNDS, SMOKE_SETTLE
    if chosen.case:
        cases = tuple(case for case in ALL.values() if re.search(chosen.case, str(case)))
    timed: dict[str, dict[str, Any]] = {}
    for case in in_time(cases, chosen):
        for policy in POLICIES:
            args = chosen.rounds or rounds, chosen.seconds, limit, chosen.compiled
            found = timed.setdefault(str(case), {})[policy] = alone(
                chosen.packages, policy, "speed", case, *args
            )
            title(table(case, policy, found))
    widest = cases[0]
    count, times = (SMOKE_FIRST, 1) if chosen.smoke else (FIRST, chosen.rounds or FIRST_ROUNDS)
    firsts: dict[str, Any] = {}
    for policy in POLICIES:
        found = firsts[policy] = of_first(chosen.packages, policy, widest, times, count)
        title(f"{widest}, {policy}: the first {count} iterations of a process")
        rows = [(k, str(one["ms"]), str(one["against_fused"])) for k, one in found.items()]
        print(columns(rows), flush=True)
    measured = SMOKE[0] if chosen.smoke else PLAIN
    title(f"MB of tensors in the tenth iteration of {measured}")
    peaks: dict[str, Any] = {}
    for kind in (FUSED, *KINDS):
        progress(kind)
        peaks[kind] = alone(chosen.packages, "default malloc", "peak", measured, kind, limit)
    rows = [(kind, f"{one['tensors_mb']:.1f}") for kind, one in peaks.items()]
    print(columns(rows), flush=True)
    memory = {str(measured): peaks}
    of_process = {"iterations": count, "rounds": times, str(widest): firsts}
    return {"speed": timed, "first": of_process, "memory": memory}


if __name__ == "__main__":
    packages, name, threads, label, *rest = json.loads(sys.argv[1])
    sys.path.append(packages)
    torch.set_num_threads(threads)
    result = {"speed": speed, "first": first, "peak": peak}[name](ALL[label], *rest)
    print(json.dumps(result, default=vars))
