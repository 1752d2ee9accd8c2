# SPDX-License-Identifier: BSD-3-Clause
"""The parts of tests/gpu/run, in their order."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import machine
from judge import (
    judge_bandwidth,
    judge_benchmark,
    judge_captured,
    judge_controls,
    judge_sanitizers,
    judge_tests,
)
from machine import Machine
from part import FAILED, NOT_RUN, OK, Command, Part, Ran, Verdict, judge_by_status
from results import Results

sys.path.append(str(Path(__file__).resolve().parent.parent))

from on_devices import BITS, LAYERS, PROMISES  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = "9"  # exit status of compute-sanitizer where it found something
#: Tests at a time; each has a thread of its own, and one waits for the GPU.
PROCESSES = max(3, min(12, 3 * (os.cpu_count() or 1) // 4))
PROGRAMS = 60  # random ones, of each process
GPU_BITS = ["test_gpu_bits", "test_gpu_rules", "test_gpu_rounding"]
TRANSPARENCY = ["test_streams", "test_side_stream", "test_training", "test_clipping"]
TRANSPARENCY += ["test_graphs", "test_memory", "test_profile", "test_gpu_final"]
EACH = "python/programs/test_each.py::test_each[forward-"
FACTORS = {"factors": EACH + "clipped_by_optfuse]"}
#: Guard, and the test that fails without it: one that can fail.
CONTROLS = {
    "cpu": {
        "key": EACH + "read]",
        "raw": EACH + "read_the_whole]",
        "privacy": EACH + "hold]",
        **FACTORS,
    },
    "cuda": {  # where weights never wait, gradients do
        **FACTORS,
        "graphs": "device/test_graphs.py::test_forward_and_backward_in_a_graph[0.05]",
        "streams": "device/test_clipping.py::test_whatever_order_a_script_keeps"
        "[read_on_another_stream]",
    },
}


def patience(device: str) -> float:
    """By which limits are multiplied: no machine is lent where a CPU plays the GPU, and other work
    may be beside."""
    return 5.0 if device == "cpu" else 1.0


@dataclass
class Plan:
    root: Path
    machine: Machine
    device: str
    quick: bool
    built: Path | None
    results: Results
    until: float  # of time.monotonic(): the end of the whole run
    environment: dict[str, str] = field(init=False)
    kept: float = 0.0  # seconds, for the parts that follow

    def __post_init__(self) -> None:
        self.environment = {
            **self.machine.environment,
            "OMP_WAIT_POLICY": "passive",
            "PYTHONUNBUFFERED": "1",  # who is ended at its time limit leaves what it found
            "TORCHINDUCTOR_COMPILE_THREADS": "2",  # a process, and several run at once
        }

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

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

    def tests(self, *arguments: str, **variables: str) -> Command:
        """Runs pytest on the device."""
        where = {"OPTFUSE_TEST_ON": "cuda"} if self.on_gpu else {}
        pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        return Command([*pytest, *arguments], where | variables)

    def left(self) -> float:
        return self.until - time.monotonic()


Maker = Callable[[Plan], Part | None]

CALLS = ("1", "2", "3")


def sequence(call: str | None) -> list[tuple[Maker, float]]:
    """Parts after the build, and the seconds that are kept for each by those before it."""
    first = [(kernels, 20.0), (mended, 60.0), (captured, 230.0)]
    second = [(more_captured, 180.0), (bits, 120.0), (transparency, 90.0), (controls, 30.0)]
    second += [(random_programs, 30.0), (cxx_door, 20.0)]
    third = [(benchmark, 130.0), (bandwidth, 30.0), (recorded_times, 30.0), (fused_pass, 30.0)]
    third += [(sanitizers, 80.0), (layers, 50.0), (promises, 60.0), (from_ptx, 30.0)]
    short = [*first, (bits, 60.0), (benchmark, 100.0), *second[3:]]
    return {"1": first, "2": second, "3": third, None: short}[call]


def parts(
    plan: Plan, call: str | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Part]:
    """The build, then those whose name is wanted, one after the other, because the later ones
    use what the first has built. No time is kept for the others."""
    made = [(maker, keep, maker(plan)) for maker, keep in sequence(call)]
    makers = [(maker, keep) for maker, keep, part in made if part and wanted(part.name)]
    plan.kept = sum(keep for _, keep in makers)
    yield replace(build(plan), after=plan.kept)
    if not plan.use_what_was_built():
        return
    for maker, keep in makers:
        plan.kept -= keep
        part = maker(plan)
        if part:
            yield replace(part, after=plan.kept)


BUILD, CHECKS, MEASURED = "build.log", "checks.log", "measurements.log"


def build(plan: Plan) -> Part:
    if plan.built:
        return Part("build", [], 0, BUILD, lambda _: Verdict(OK, f"as it is in {plan.build.name}"))
    meson = machine.meson(plan.machine)
    # Another compiler may warn of other things.
    options = ["-Dtests=false", "-Dguards=true", "-Dshim=enabled", "-Dwerror=false"]
    options.append(f"-Dtorch_python={sys.executable}")
    if plan.on_gpu:
        options += ["-Dcuda=enabled", "-Dgpuprograms=true", f"-Dcudaarch={plan.machine.chip}"]
    else:
        options.append("-Dcuda=disabled")
    again = ["--reconfigure"] if (plan.build / "meson-info").is_dir() else []
    setup = [*meson, "setup", *again, str(plan.build), str(plan.root), *options]
    targets = ["gpu-run"] if plan.on_gpu else []
    compile = Command([*meson, "compile", "-C", str(plan.build), *targets])
    return Part("build", [Command(setup), compile], 240, BUILD, judge_build)


def judge_build(ran: list[Ran]) -> Verdict:
    """By status; what a successful build printed last tells nothing."""
    verdict = judge_by_status(ran)
    return Verdict(OK) if verdict.word == OK else verdict


def on_gpu(maker: Maker) -> Maker:
    """A part that is left out on the CPU."""

    def made(plan: Plan) -> Part | None:
        return maker(plan) if plan.on_gpu else None

    return made


@on_gpu
def kernels(plan: Plan) -> Part:
    check = Command([plan.program("kernel_check")])
    return Part("kernels against plain C", [check], 120, CHECKS)


@on_gpu
def from_ptx(plan: Plan) -> Part:
    """The PTX of the wheel, which the driver compiles for chips that have no code in it."""
    check = Command([plan.program("kernel_check"), "--rounds", "4"], {"CUDA_FORCE_PTX_JIT": "1"})
    return Part("kernels compiled by the driver", [check], 120, CHECKS)


@on_gpu
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
    return Part(name, commands, 240, CHECKS, judge_sanitizers, together=True)


def tests(
    plan: Plan,
    title: str,
    limit: float,
    python: Sequence[str] = (),
    device: Sequence[str] = (),
    chosen: Sequence[str] = (),
) -> Part:
    """Files of tests/python, which make on the device whatever they make (see tests/on_devices.py),
    and of tests/device, which are for GPUs only."""
    share = plan.on_gpu and importlib.util.find_spec("xdist")
    together = ["-n", str(PROCESSES), "--dist", "worksteal"] if share else []
    commands = []
    for folder, names in (("python", python), ("device", device if plan.on_gpu else ())):
        paths = [str(plan.root / "tests" / folder / f"{name}.py") for name in names]
        commands += [plan.tests(*together, *paths, *chosen)] if paths else []
    return Part(title, commands, limit, CHECKS, judge_tests)


def bits(plan: Plan) -> Part:
    quick = ["-k", "float32"] if plan.quick else []
    return tests(plan, "bits of stock", 120.0 if plan.quick else 280.0, BITS, GPU_BITS, quick)


@on_gpu
def mended(plan: Plan) -> Part:
    """The last runs had faults in programs of recorded classes and in graphs' updates; counters and
    clipping in graphs are younger than those runs."""
    chosen = ["-k", "only_steps or operators or styles or in_a_graph"]
    files = ["test_gpu_recorded", "test_gpu_programs", "test_graphs"]
    return tests(plan, "what failed before", 100.0, device=files, chosen=chosen)


@on_gpu
def cxx_door(plan: Plan) -> Part:
    """A program without Python, whose libraries are this Python's. Only builds with tests have it:
    it takes a minute to compile."""
    name, program = "a C++ program's bits", plan.build / "tests" / "cxx" / "test_cxx"
    found = importlib.util.find_spec("torch")
    if not program.exists() or not found or not found.origin:
        missing = Verdict(NOT_RUN, "the build has no test_cxx: --built, of one with -Dtests=true")
        return Part(name, [], 0, CHECKS, lambda _: missing)
    folders = Path(found.origin).parent / "lib", plan.build / "shim", plan.build / "python_loader"
    where = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
    return Part(name, [Command([str(program), "cuda"], where)], 60, CHECKS)


@on_gpu
def transparency(plan: Plan) -> Part:
    return tests(plan, "transparency", 180.0, device=TRANSPARENCY)


def layers(plan: Plan) -> Part:
    return tests(plan, "K-FAC and another order of backward", 150.0, LAYERS, ["test_packing"])


def promises(plan: Plan) -> Part:
    return tests(plan, "tests of promises", 150.0, PROMISES)


@on_gpu
def random_programs(plan: Plan) -> Part:
    """Seeds that no run before had; run_programs.py repeats one that failed."""
    seed, commands = int(time.time()), []
    where = {"OPTFUSE_TEST_ON": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for i in range(PROCESSES):
        chosen = ("--programs", str(PROGRAMS), "--seed", str(seed + i * PROGRAMS))
        commands.append(plan.python("tests/python/run_programs.py", *chosen, **where))
    return Part("random programs", commands, 120.0, CHECKS, together=True)


def recorded_times(plan: Plan) -> Part:
    command = plan.python("tests/gpu/recorded_times.py", "--device", plan.device)
    return Part("times of recorded classes", [command], 60, MEASURED, judge_last)


def fused_pass(plan: Plan) -> Part:
    command = plan.python("tests/gpu/fused_pass.py", "--device", plan.device)
    return Part("the fused back pass", [command], 60, MEASURED, judge_last)


def controls(plan: Plan) -> Part:
    """The same tests in the test-only build: all kept, and each broken without its guard."""
    name = "negative controls"
    if not plan.guards:
        missing = Verdict(FAILED, "the build has no library with switchable guards")
        return Part(name, [], 0, CHECKS, lambda _: missing)

    def without(guard: str, *tests: str) -> Command:
        variables = {"OPTFUSE_LIBRARY": str(plan.guards), "OPTFUSE_TEST_GUARDS_OFF": guard}
        return plan.tests(*(str(plan.root / "tests" / test) for test in tests), **variables)

    chosen = CONTROLS[plan.device]
    commands = [without("", *chosen.values())]
    commands += [without(guard, test) for guard, test in chosen.items()]
    return Part(name, commands, 60, CHECKS, judge_controls, together=True)


#: Cells that say most in little time: many small tensors, and few large ones.
BENCHMARKS = {
    "cpu": {"adamw": ["--smoke", "--threads", "1"]},
    "cuda": {"adamw": ["--quick", "--seconds", "6", "--section", "cells", "--section", "kernels"]},
}
GRAPHS = ["--section", "captured", "--seconds", "15"]
CAPTURED = {"adamw": [*GRAPHS[:-1], "25"]}
MORE_CAPTURED = {"adamw": [*GRAPHS, "--more"], "momentum": [*GRAPHS, "--model", "MobileNetV2"]}
FOR_A_CELL = 25.0  # seconds that a cell may take over its share
MOST = 400.0


def measured(
    plan: Plan, name: str, chosen: dict[str, list[str]], judge: Callable[[list[Ran], Path], Verdict]
) -> Part:
    """The benchmark, of one optimizer after the other. Each stops by itself in time, so
    that its last cell is in its results, too."""
    out = plan.results.folder / "benchmark"
    seconds = min(MOST, plan.left() - plan.kept)
    shares = [0.75, 0.25] if len(chosen) > 1 else [1.0]
    commands = []
    for share, (optimizer, how) in zip(shares, chosen.items(), strict=True):
        budget = max(0.0, share * seconds - FOR_A_CELL)
        arguments = [*how, "--device", plan.device, "--optimizer", optimizer]
        arguments += ["--out", str(out), "--budget", f"{budget:.0f}"]
        commands.append(plan.python("benchmarks/bench.py", *arguments))
    return Part(name, commands, MOST, MEASURED, lambda ran: judge(ran, out))


def benchmark(plan: Plan) -> Part:
    chosen = BENCHMARKS[plan.device]
    return measured(plan, "benchmark against stock", chosen, judge_benchmark)


@on_gpu
def captured(plan: Plan) -> Part:
    return measured(plan, "iterations in graphs", CAPTURED, judge_captured)


@on_gpu
def more_captured(plan: Plan) -> Part:
    return measured(plan, "more iterations in graphs", MORE_CAPTURED, judge_captured)


@on_gpu
def bandwidth(plan: Plan) -> Part:
    bench = [Command([plan.program("kernel_bench")])]
    return Part("kernel bandwidth", bench, 60, MEASURED, judge_bandwidth)


def judge_last(ran: list[Ran]) -> Verdict:
    """By status; what it found is all that it printed."""
    return Verdict(judge_by_status(ran).word, ran[0].output.strip()[-2000:])
