# SPDX-License-Identifier: BSD-3-Clause
"""Trains real models on real data with every implementation of the optimizer,
interleaved in one process, and says what optfuse saves. See --help."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import alone
import clip
import launch
import optimizers
import scaling
import sweeps
import torch
from bytes_alone import bytes_alone
from cells import (
    GRID_CELLS,
    MODELS,
    OPTIMIZERS,
    Cell,
    batches,
    cells_for,
    parameters_of,
    training,
)
from console import progress, title
from cores import FAR_NS, Distances
from data import handwritten
from floor import WRITTEN, Floor, available
from memory import peak_bytes
from micro import costs
from report import Measured, Results, machine, markdown, plot, write_json
from shares import share_table, shares
from table import FUSED, lines, text_table
from updates import updates
from variants import few_variants, variants
from verdict import verdict

import optfuse
from optfuse._ab.variants import Wrap

# Each prints what it finds and returns its figures.
EXTRA = {
    "alone": alone.section,
    "clip": clip.section,
    "launch": launch.section,
    "optimizers": optimizers.section,
    "scaling": scaling.section,
    "sweeps": sweeps.section,
}
SECTIONS = ("speed", "memory", "cost", "updates", "grid", *EXTRA)
# The machinery alone is timed on the CPU, where nothing runs beside it.
SECTIONS_OF = {"cpu": ("speed", "memory", "cost", "clip"), "cuda": ("speed", "memory", "updates")}
SMOKE_SECTIONS = ("speed", "memory", "updates")
UNRECORDED = ("out", "markdown", "no_plot", "budget", "until")
MOST, GRID_ROUNDS = 400, 30
PRECISION = {False: "float32", True: "float32 with bfloat16 by autocast"}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def steady_heap() -> None:
    """steady: the C library keeps freed memory. By default it may give some
    back to the system and take it again at the price of page faults."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--quick", action="store_true", help="a few cells, within two minutes")
    parser.add_argument("--smoke", action="store_true", help="all of it, too little to tell much")
    parser.add_argument(
        "--device", choices=SECTIONS_OF, default=there, help="default: a GPU where there is one"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument(
        "--model", action="append", choices=MODELS, help="only this model; may be repeated"
    )
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, help="only this one; grid: more cells"
    )
    parser.add_argument("--seconds", type=float, help="for each cell; default 40, quick 12")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds; then no other cell"
    )
    parser.add_argument("--batch-from", type=int, default=0, help="only cells of at least so many")
    parser.add_argument("--autocast", action="store_true", help="train in bfloat16 by autocast")
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        help="a step() under torch.compile, too; default: on a GPU, unless --quick",
    )
    parser.add_argument("--threads", type=int, help="of PyTorch; default: as it chooses")
    parser.add_argument(
        "--rounds", type=int, help=f"of each cell; the most, default {MOST}; of grid, {GRID_ROUNDS}"
    )
    parser.add_argument(
        "--malloc", choices=("default", "steady"), default="default", help=steady_heap.__doc__
    )
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="print a table for the README")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    chosen = parser.parse_args()
    chosen.until = time.monotonic() + chosen.budget
    chosen.seconds = chosen.seconds or seconds_of(chosen)
    sections = SMOKE_SECTIONS if chosen.smoke else SECTIONS_OF[chosen.device]
    chosen.section = chosen.section or list(sections)
    if chosen.compiled is None:
        chosen.compiled = chosen.device == "cuda" and not (chosen.quick or chosen.smoke)
    return chosen


def seconds_of(chosen: argparse.Namespace) -> float:
    if chosen.smoke:
        return 0.5
    return 12.0 if chosen.quick else 40.0


def in_time(cells: list[Cell], chosen: argparse.Namespace) -> Iterator[Cell]:
    for i, cell in enumerate(cells):
        if time.monotonic() > chosen.until:
            title(f"left out for want of time: {', '.join(map(str, cells[i:]))}")
            return
        yield cell


def measure_speed(chosen: argparse.Namespace, cells: list[Cell], results: Results) -> None:
    for cell in in_time(cells, chosen):
        wraps = variants(cell.device, chosen.compiled)
        compare(chosen, cell, wraps, chosen.rounds or MOST, chosen.seconds, results)


def measure_grid(chosen: argparse.Namespace, cells: list[Cell], results: Results) -> None:
    """Every model at every batch, a given number of rounds however long they take."""
    wraps = {**few_variants(), **bytes_alone(chosen.optimizer)}
    for cell in in_time(cells, chosen):
        compare(chosen, cell, wraps, chosen.rounds or GRID_ROUNDS, None, results)


def floor_of(chosen: argparse.Namespace, cell: Cell) -> Floor | None:
    if cell.device != "cpu" or not available or chosen.optimizer not in WRITTEN:
        return None
    return Floor(chosen.optimizer, parameters_of(cell))


def compare(
    chosen: argparse.Namespace,
    cell: Cell,
    wraps: Mapping[str, Wrap],
    rounds: int,
    seconds: float | None,
    results: Results,
) -> None:
    distances, floor = Distances(), floor_of(chosen, cell)

    def each_round(message: str) -> None:
        progress(f"{cell}: {message}")
        distances.sample()
        if floor:
            floor.sample()

    compared = optfuse.ab(
        training(cell, chosen.optimizer, chosen.autocast),
        variants=wraps,
        rounds=rounds,
        iterations=cell.iterations,
        seconds=seconds,
        progress=each_round,
    )
    everything = list(range(compared.settings["rounds"]))
    places = distances.places() if cell.device == "cpu" else {}
    for where, picked in (places or {"": everything}).items():
        core_ns = distances.median_ns(picked) if distances.ns else None
        rows = lines(compared, picked)
        parts = shares(compared, picked, floor) if cell.device == "cpu" else []
        parts = [part for part in parts if part.name in {row.name for row in rows}]
        one = Measured(cell, compared, where, core_ns, picked, rows, parts)
        results.cells.append(one)
        title(f"{one}: {len(picked)} rounds" + (f", {core_ns:.0f} ns apart" if core_ns else ""))
        print(text_table(one.lines))
        if parts:
            print(share_table(parts, floor))
    for row in compared.rows:
        if row.note:
            print(f"{row.name} left out: {row.note}")


def measure_memory(chosen: argparse.Namespace, cells: list[Cell], results: Results) -> None:
    title("Peak memory of tensors, MB (and against fused=True)")
    for cell in in_time(cells, chosen):
        peaks: dict[str, int] = {}
        build = training(cell, chosen.optimizer, chosen.autocast)
        if cell.device == "cuda":  # what is allocated once is allocated before
            next(batches(cell))
            peak_bytes(build, lambda optimizer: optimizer, cell.device)
        for name, wrap in variants(cell.device).items():
            progress(f"memory: {cell}, {name}")
            peaks[name] = peak_bytes(build, wrap, cell.device)
        results.memory[str(cell)] = peaks
        progress("")
        print(f"{cell}")
        for name, peak in peaks.items():
            print(f"  {name:<22} {peak / 1e6:8.1f}  {(peak - peaks[FUSED]) / 1e6:+8.1f}")


def measure_costs(chosen: argparse.Namespace, results: Results) -> None:
    title("Cost of the machinery, for one parameter of one element (one thread)")
    for cost in costs(repeats=10 if chosen.quick else 40):
        results.costs.append(cost)
        progress("")
        print(cost, flush=True)
        progress("cost: measuring")


def measure_updates(chosen: argparse.Namespace, results: Results) -> None:
    title("The update alone, ms a step: tensors x elements")
    make = OPTIMIZERS[chosen.optimizer]
    repeats = 5 if chosen.smoke else 40
    for one in updates(chosen.optimizer, make, chosen.device, repeats, chosen.smoke):
        results.updates.append(one)
        print(one, flush=True)


def describe(results: Results) -> None:
    for name, value in machine().items():
        print(f"{name}: {value}")
    if results.load > 0.5:
        print(f"Other programs are running (load {results.load:.1f}): expect wide intervals.")
    precision = PRECISION[results.settings["autocast"]]
    print(
        f"{results.settings['optimizer']}, {precision}. Medians with 95 % bootstrap intervals."
        " x: times as fast, round by round. recovered: share of what fused=True costs over no"
        " optimizer, where that is more than nothing. floor: the time of a kernel that moves an"
        " update's bytes and computes nothing; x floor: how many times that the optimizer takes."
        " bytes alone: such a kernel in training, run by hooks where fusion updates, which is the"
        " least that fusion can take; its recovered is the most."
        " loss: mean of the last 20. far cores: rounds in which a cache line needed more than"
        f" {FAR_NS:.0f} ns from one core to the other. curve: every loss equals fused=True's."
        f" faults: page faults an iteration, with malloc {results.settings['malloc']}."
    )
    if results.settings["device"] == "cuda":
        print(
            "host: ms in which the host issued an iteration. Some of PyTorch's kernels for GPUs do"
            " not repeat their own bits, so that curves can differ between any two runs;"
            " tests/gpu/run compares where they do."
        )
    elif not available:
        print("libfloor.so was not built, or finds no OpenMP runtime: there is no floor.")
    if handwritten() is None:
        print("scikit-learn is missing: the images are invented.")


def write(chosen: argparse.Namespace, results: Results, ended: bool = False) -> None:
    """After each section, so that who is ended early leaves those before it."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    stem = f"{chosen.optimizer}-cpu-{threads}-thread{'s' if threads > 1 else ''}"
    if chosen.device == "cuda":
        stem = f"{chosen.optimizer}-cuda" + ("-autocast" if chosen.autocast else "")
    if chosen.section == ["grid"]:
        stem += "-grid"
    if results.cells or results.memory or results.costs or results.updates:
        write_json(results, chosen.out / f"{stem}.json")
    if ended and results.cells and not chosen.no_plot:
        plot(results, chosen.out / f"{stem}.png")
    if ended and chosen.markdown and results.cells:
        title(markdown(results))


def measure_extra(chosen: argparse.Namespace) -> None:
    one_thread = "-1-thread" if torch.get_num_threads() == 1 else ""
    for name in (name for name in EXTRA if name in chosen.section):
        found = EXTRA[name](chosen)
        if found is not None:
            chosen.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": machine(), "section": name, **found}, indent=1)
            stem = f"{name}-{chosen.optimizer}" + one_thread
            (chosen.out / f"{stem}.json").write_text(text + "\n", "utf-8")


def cells_of(chosen: argparse.Namespace, quick: bool) -> list[Cell]:
    cells = cells_for(chosen.device, quick, chosen.smoke)
    models = chosen.model or MODELS
    return [cell for cell in cells if cell.model in models and cell.batch >= chosen.batch_from]


def main() -> None:
    chosen = arguments()
    began = time.monotonic()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.malloc == "steady":
        steady_heap()
    results = Results({k: v for k, v in vars(chosen).items() if k not in UNRECORDED})
    describe(results)
    grid = [cell for cell in GRID_CELLS if not chosen.model or cell.model in chosen.model]
    measures: dict[str, Callable[[], None]] = {
        "speed": lambda: measure_speed(chosen, cells_of(chosen, chosen.quick), results),
        "grid": lambda: measure_grid(chosen, grid, results),
        "memory": lambda: measure_memory(chosen, cells_of(chosen, quick=True), results),
        "cost": lambda: measure_costs(chosen, results),
        "updates": lambda: measure_updates(chosen, results),
    }
    for name, measure in measures.items():
        if name in chosen.section:
            measure()
            write(chosen, results)
        if name == "grid" and results.cells:
            title("\n".join(verdict(results.cells)))
    measure_extra(chosen)
    write(chosen, results, ended=True)
    title(f"{time.monotonic() - began:.0f} s; results in {chosen.out}")


if __name__ == "__main__":
    main()
