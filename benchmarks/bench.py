# SPDX-License-Identifier: BSD-3-Clause
"""Trains real models on real data with every implementation of the optimizer,
interleaved in one process, and says what optfuse saves. See --help."""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import torch
from cells import CELLS, MODELS, OPTIMIZERS, QUICK_CELLS, Cell, training
from clip import clipped
from cores import FAR_NS, Distances
from memory import peak_bytes
from micro import costs
from report import Measured, Results, machine, markdown, plot, write_json
from table import FUSED, lines, text_table
from variants import variants

import optfuse

SECTIONS = ("speed", "memory", "cost", "clip")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def steady_heap() -> None:
    """steady: the C library keeps freed memory. By default it may give some
    back to the system and take it again at the price of page faults."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four cells, within two minutes")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument(
        "--model", action="append", choices=MODELS, help="only this model; may be repeated"
    )
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one")
    parser.add_argument("--seconds", type=float, help="for each cell; default 45, quick 12")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: as it chooses")
    parser.add_argument("--rounds", type=int, default=400, help="the most rounds for each cell")
    parser.add_argument(
        "--malloc", choices=("default", "steady"), default="default", help=steady_heap.__doc__
    )
    parser.add_argument("--markdown", action="store_true", help="print a table for the README")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    chosen.seconds = chosen.seconds or (12.0 if chosen.quick else 45.0)
    chosen.section = chosen.section or list(SECTIONS)
    return chosen


def progress(message: str) -> None:
    """One line that overwrites itself; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def title(text: str) -> None:
    progress("")
    print(f"\n{text}", flush=True)


def measure_speed(chosen: argparse.Namespace, cells: list[Cell], results: Results) -> None:
    for cell in cells:
        distances = Distances()

        def each_round(message: str, cell: Cell = cell, distances: Distances = distances) -> None:
            progress(f"{cell}: {message}")
            distances.sample()

        compared = optfuse.ab(
            training(cell, chosen.optimizer),
            variants=variants(),
            rounds=chosen.rounds,
            iterations=cell.iterations,
            seconds=chosen.seconds,
            progress=each_round,
        )
        everything = list(range(compared.settings["rounds"]))
        for where, rounds in (distances.places() or {"": everything}).items():
            core_ns = distances.median_ns(rounds) if distances.ns else None
            one = Measured(cell, compared, where, core_ns, rounds, lines(compared, rounds))
            results.cells.append(one)
            title(f"{one}: {len(rounds)} rounds" + (f", {core_ns:.0f} ns apart" if core_ns else ""))
            print(text_table(one.lines))
        for row in compared.rows:
            if row.note:
                print(f"{row.name} left out: {row.note}")


def measure_memory(chosen: argparse.Namespace, cells: list[Cell], results: Results) -> None:
    title("Peak memory of tensors, MB (and against fused=True)")
    for cell in cells:
        peaks: dict[str, int] = {}
        for name, wrap in variants().items():
            progress(f"memory: {cell}, {name}")
            peaks[name] = peak_bytes(training(cell, chosen.optimizer), wrap)
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


def measure_clipping(chosen: argparse.Namespace) -> None:
    title("Clipping and update of an MLP of 50 M parameters, nothing else")
    for part in clipped(rounds=15 if chosen.quick else 40):
        progress("")
        print(part, flush=True)
        progress("clip: measuring")


def describe(results: Results) -> None:
    for name, value in machine().items():
        print(f"{name}: {value}")
    if results.load > 0.5:
        print(f"Other programs are running (load {results.load:.1f}): expect wide intervals.")
    print(
        f"{results.settings['optimizer']}, float32. Medians with 95 % bootstrap intervals. x: times"
        " as fast, round by round. recovered: share of what fused=True costs over no optimizer."
        " loss: mean of the last 20. far cores: rounds in which a cache line needed more than"
        f" {FAR_NS:.0f} ns from one core to the other. curve: every loss equals fused=True's."
        f" faults: page faults an iteration, with malloc {results.settings['malloc']}."
    )


def write(chosen: argparse.Namespace, results: Results) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    stem = f"{chosen.optimizer}-cpu-{threads}-thread{'s' if threads > 1 else ''}"
    write_json(results, chosen.out / f"{stem}.json")
    if results.cells:
        plot(results, chosen.out / f"{stem}.png")
    if chosen.markdown and results.cells:
        title(markdown(results))


def main() -> None:
    chosen = arguments()
    began = time.monotonic()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.malloc == "steady":
        steady_heap()
    results = Results({k: v for k, v in vars(chosen).items() if k not in ("out", "markdown")})
    describe(results)
    small = [cell for cell in QUICK_CELLS if not chosen.model or cell.model in chosen.model]
    cells = [cell for cell in CELLS if not chosen.model or cell.model in chosen.model]
    if "speed" in chosen.section:
        measure_speed(chosen, small if chosen.quick else cells, results)
    if "memory" in chosen.section:
        measure_memory(chosen, small, results)
    if "cost" in chosen.section:
        measure_costs(chosen, results)
    if "clip" in chosen.section:
        measure_clipping(chosen)
    write(chosen, results)
    title(f"{time.monotonic() - began:.0f} s; results in {chosen.out}")


if __name__ == "__main__":
    main()
