# SPDX-License-Identifier: BSD-3-Clause
"""The parts of tests/gpu/run, in their order."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import machine
from judge import (
    judge_bandwidth,
    judge_benchmark,
    judge_controls,
    judge_sanitizers,
    judge_scenarios,
)
from machine import Machine
from part import FAILED, NOT_RUN, OK, Command, Part, Ran, Verdict, judge_by_status
from results import Results

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = "9"  # exit status of compute-sanitizer where it found something
BITS_PROCESSES, TRANSPARENCY_PROCESSES = 6, 4
ALWAYS = {
    "key": "weight read by clone",
    "raw": "state read by torch.save",
    "privacy": "aliases held across steps",
    "factors": "clipping left to the update",
}
#: Guard, and the scenario that breaks without it: a test that can fail.
CONTROLS = {
    "cpu": ALWAYS,
    "cuda": {
        **ALWAYS,
        "graphs": "forward and backward in a graph and step outside",
        "streams": "first use on another stream that waited before",
    },
}


@dataclass
class Plan:
    root: Path
    machine: Machine
    device: str
    quick: bool
    built: Path | None
    scratch: Path
    results: Results
    until: float  # of time.monotonic(): the end of the whole run
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {**self.machine.environment, "OMP_WAIT_POLICY": "passive"}

    @property
    def build(self) -> Path:
        return (self.built or self.root / "build-gpu" / "build").resolve()

    @property
    def guards(self) -> str | None:
        found = sorted((self.build / "shim").glob("liboptfuse_torch-*-guards.so"))
        return str(found[0]) if found else None

    def use_what_was_built(self) -> bool:
        libraries = sorted((self.build / "shim").glob("liboptfuse_torch-*.so"))
        found = [str(path) for path in libraries if not path.stem.endswith("-guards")]
        self.environment["PYTHONPATH"] = str(self.root / "python_loader")
        self.environment["OPTFUSE_LIBRARY"] = found[0] if found else ""
        return bool(found)

    def program(self, name: str) -> str:
        return str(self.build / "tests" / "gpu" / f"gpu_{name}")

    def python(self, script: str, *arguments: str, **variables: str) -> Command:
        return Command([sys.executable, str(self.root / script), *arguments], variables)

    def scenarios(self, part: str, *arguments: str, **variables: str) -> Command:
        quick = ["--quick"] if self.quick else []
        given = (part, "--device", self.device, *quick, *arguments)
        return self.python("tests/gpu/scenarios.py", *given, **variables)

    def left(self) -> float:
        return self.until - time.monotonic()

    def collect(self) -> None:
        """Takes over what the parts found out as JSON."""
        for path in sorted(self.scratch.glob("*.json")):
            self.results.details[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(self.scratch.glob("benchmark/*.json")):
            shutil.copy(path, self.results.folder / f"benchmark-{path.stem}.json")


def parts(plan: Plan) -> Iterator[Part]:
    """One after the other, because the later ones use what the first has built."""
    yield build(plan)
    if not plan.use_what_was_built():
        return
    on_gpu = plan.device == "cuda"
    if on_gpu:
        yield Part("kernels against plain C", [Command([plan.program("kernel_check")])], 60, CHECKS)
        yield sanitizers(plan)
    yield scenarios(plan, "bits", BITS_PROCESSES if on_gpu else 1, 110)
    yield scenarios(plan, "transparency", TRANSPARENCY_PROCESSES if on_gpu else 1, 110)
    yield controls(plan)
    if on_gpu:
        bench = [Command([plan.program("kernel_bench")])]
        yield Part("kernel bandwidth", bench, 40, MEASURED, judge_bandwidth)
    yield benchmark(plan)
    yield trace(plan)


BUILD, CHECKS, MEASURED = "build.log", "checks.log", "measurements.log"


def build(plan: Plan) -> Part:
    if plan.built:
        return Part("build", [], 0, BUILD, lambda _: Verdict(OK, f"as it is in {plan.build.name}"))
    meson = machine.meson(plan.machine)
    options = ["-Dtests=false", "-Dguards=true", "-Dshim=enabled"]
    options.append(f"-Dtorch_python={sys.executable}")
    if plan.device == "cuda":
        options += ["-Dcuda=enabled", "-Dgpuprograms=true", f"-Dcudaarch={plan.machine.chip}"]
    else:
        options.append("-Dcuda=disabled")
    again = ["--reconfigure"] if (plan.build / "meson-info").is_dir() else []
    setup = [*meson, "setup", *again, str(plan.build), str(plan.root), *options]
    commands = [Command(setup), Command([*meson, "compile", "-C", str(plan.build)])]
    return Part("build", commands, 170, BUILD, judge_build)


def judge_build(ran: list[Ran]) -> Verdict:
    """By status; what a successful build printed last tells nothing."""
    verdict = judge_by_status(ran)
    return Verdict(OK) if verdict.word == OK else verdict


def sanitizers(plan: Plan) -> Part:
    name = "compute-sanitizer on the kernels"
    found = plan.machine.find("compute-sanitizer")
    if not found:
        missing = Verdict(NOT_RUN, "compute-sanitizer is not on this machine")
        return Part(name, [], 0, CHECKS, lambda _: missing)
    commands = []
    for tool in TOOLS:
        how = [found, "--tool", tool, "--error-exitcode", FOUND]
        commands.append(Command([*how, plan.program("planted"), tool]))
        commands.append(Command([*how, plan.program("kernel_check"), "--rounds", "2"]))
    return Part(name, commands, 75, CHECKS, judge_sanitizers, together=True)


def scenarios(plan: Plan, part: str, processes: int, limit: float) -> Part:
    commands = []
    for i in range(processes):
        where = str(plan.scratch / f"{part}-{i}.json")
        commands.append(plan.scenarios(part, "--share", f"{i}/{processes}", "--json", where))
    title = {"bits": "bits of stock fused=True", "transparency": "transparency"}[part]
    return Part(title, commands, limit, CHECKS, judge_scenarios, together=True)


def controls(plan: Plan) -> Part:
    """The same scenarios in the test-only build: all kept, and each broken without
    its guard."""
    name = "negative controls"
    if not plan.guards:
        missing = Verdict(FAILED, "the build has no library with switchable guards")
        return Part(name, [], 0, CHECKS, lambda _: missing)

    def without(guard: str, *scenarios: str) -> Command:
        variables = {"OPTFUSE_LIBRARY": str(plan.guards), "OPTFUSE_TEST_GUARDS_OFF": guard}
        only = [word for scenario in scenarios for word in ("--only", scenario)]
        return plan.scenarios("transparency", "--mode", "forward", *only, **variables)

    chosen = CONTROLS[plan.device]
    commands = [without("", *chosen.values())]
    commands += [without(guard, scenario) for guard, scenario in chosen.items()]
    return Part(name, commands, 60, CHECKS, judge_controls, together=True)


#: Cells that say most in little time: many small tensors, and few large ones.
BENCHMARKS = {
    "cpu": {"adamw": ["--smoke", "--threads", "1"]},
    "cuda": {
        "adamw": ["--quick", "--seconds", "6"],
        "momentum": ["--quick", "--seconds", "6", "--section", "speed", "--model", "MobileNetV2"],
    },
}
#: Of the time left: what the optimizers share, what the trace and a last cell need.
FOR_TRACE, FOR_A_CELL = 35.0, 25.0


def benchmark(plan: Plan) -> Part:
    """Each optimizer stops by itself in time, so that its results are written."""
    out = plan.scratch / "benchmark"
    chosen = BENCHMARKS[plan.device]
    seconds = min(200.0, plan.left() - FOR_TRACE)
    shares = [0.75, 0.25][: len(chosen)] if len(chosen) > 1 else [1.0]
    commands = []
    for share, (optimizer, how) in zip(shares, chosen.items(), strict=True):
        budget = max(0.0, share * seconds - FOR_A_CELL)
        arguments = [*how, "--device", plan.device, "--optimizer", optimizer, "--no-plot"]
        arguments += ["--out", str(out), "--budget", f"{budget:.0f}"]
        commands.append(plan.python("benchmarks/bench.py", *arguments))
    name = "benchmark against stock"
    return Part(
        name, commands, 200, MEASURED, lambda ran: judge_benchmark(ran, out), after=FOR_TRACE
    )


def trace(plan: Plan) -> Part:
    out = str(plan.results.folder / "trace.json.gz")
    found = str(plan.scratch / "trace.json")
    command = plan.python(
        "tests/gpu/trace_updates.py", "--device", plan.device, "--out", out, "--json", found
    )
    return Part("trace of the updates", [command], 60, MEASURED, judge_last)


def judge_last(ran: list[Ran]) -> Verdict:
    """By status; what it found is all that it printed."""
    return Verdict(judge_by_status(ran).word, ran[0].output.strip()[-2000:])
