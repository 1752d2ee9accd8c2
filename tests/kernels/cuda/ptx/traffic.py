# SPDX-License-Identifier: BSD-3-Clause
"""A model of what updates cost on a GPU, from nvcc's PTX and the launches' tables: bytes,
transactions, instructions of PTX and threads at once, and the time that follows.

    traffic.py NVCC INCLUDE PTX_FOLDER OUT LIBRARIES...

PTX_FOLDER has RULE-DTYPE.ptx of one chip, LIBRARIES are the translated kernels and the yardstick
that the folder's rules do not have. The model's constants are below, and which measured rows it
was compared with: benchmarks/results/traffic-model.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from parts import FLAGS, HERE, SOURCES, as_text, linked
from ptx_text import Function, Instruction, functions
from translate import Writer

DTYPES = {"float32": 4, "bfloat16": 2}
RULES = ["adam", "sgd", "rmsprop", "adadelta", "nadam", "radam", "adamax", "rprop", "asgd",
         "adagrad", "lion", "adan"]  # fmt: skip
FUSED = ("adam", "sgd")  # stock's others are chains of kernels
BLOCK, REGISTERS, THREADS, MOST_BLOCKS = 256, 65536, 2048, 32  # of a multiprocessor of sm_90
SECTOR, WARP, VECTOR = 32, 32, 16
# Assumptions about a chip: multiprocessors, TB/s of its memory, and the share of it that a kernel
# of such streams reaches (NVIDIA's figures for copies: 0.85 to 0.92).
CHIPS = {"H100": (132, 3.35, 0.87), "H200": (132, 4.8, 0.87)}
START, ROUND = 4.0, 1.2  # microseconds: of a launch, and from a thread's loads to its stores
# PyTorch's multi-tensor kernel: threads of a block, elements of a block, blocks and tensors of a
# launch, and elements that a thread has on their way at once; it reads and writes the same arrays.
STOCK = {"threads": 512, "chunk": 65536, "blocks": 320, "tensors": 36, "at_once": 4}
STOCK_BLOCKS_AT_ONCE = 2  # by 60 registers
SIZES = [(1, 1 << 20), (1, 1 << 24), (1, 1 << 26), (160, 22000), (256, 65536), (1000, 1000)]


class Counting(Writer):
    def instruction(self, one: Instruction) -> str:
        return f"ptx_now.counted.instructions++; {super().instruction(one)}"


def counting(text: str) -> str:
    writers = [Counting(function) for function in functions(text)]
    heads = [f"{writer.head()};" for writer in writers]
    return "\n".join(['#include "ptx.h"', *heads, *(writer.text() for writer in writers)])


def kernel_of(text: str) -> Function:
    """That with most state, for the small table."""
    found = [one for one in functions(text) if one.kernel and one.name.endswith("_small")]
    return found[0]


def registers(ptxas: str, ptx: Path, folder: Path) -> int:
    command = [ptxas, "-v", "-arch=sm_90", "-o", str(folder / "cubin"), str(ptx)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", said, re.DOTALL)
    return max(int(count) for name, count in used if not name.endswith("_large"))


def blocks_at_once(count: int) -> int:
    """Registers are handed out by 8 to each thread of a warp, 256 to a warp."""
    each = (count + 7) // 8 * 8 * BLOCK
    return min(REGISTERS // each, THREADS // BLOCK, MOST_BLOCKS)


def ours(chip: str, tensors: int, n: int, size: int, traffic: float, at_once: int) -> float:
    """Microseconds of a step. Blocks take one vector of each thread, those of other dtypes than
    float32 two where that leaves four blocks to a multiprocessor."""
    multiprocessors, speed, share = CHIPS[chip]
    vectors = BLOCK * VECTOR // size
    chunk = vectors * (2 if size != 4 and tensors * n >= 8 * multiprocessors * vectors else 1)
    blocks = tensors * -(-n // chunk)
    waves = -(-blocks // (multiprocessors * at_once))
    bytes_time = tensors * n * traffic / (speed * share) / 1e6
    return START + max(bytes_time, waves * ROUND * chunk / vectors)


def stock(chip: str, tensors: int, n: int, traffic: float) -> float:
    multiprocessors, speed, share = CHIPS[chip]
    each = -(-n // STOCK["chunk"])  # blocks of a tensor
    launches = max(-(-tensors * each // STOCK["blocks"]), -(-tensors // STOCK["tensors"]))
    rounds = -(-min(n, STOCK["chunk"]) // (STOCK["threads"] * STOCK["at_once"]))
    waves = -(-tensors * each // launches // (multiprocessors * STOCK_BLOCKS_AT_ONCE))
    bytes_time = tensors * n * traffic / launches / (speed * share) / 1e6
    return launches * (START / 2 + max(bytes_time, waves * rounds * ROUND)) + START  # counts steps


def row(rule: str, dtype: str, counted: list[float], used: int) -> dict[str, object]:
    reads, writes, others, instructions = counted
    at_once, traffic = blocks_at_once(used), reads + writes
    return {
        "rule": rule,
        "dtype": dtype,
        "bytes_read": reads,
        "bytes_written": writes,
        "sectors": round(traffic / SECTOR, 4),
        "vectors": traffic / VECTOR,
        "other_accesses": round(others, 4),
        "instructions": round(instructions, 1),
        "registers": used,
        "blocks_at_once": at_once,
        "threads_at_once": at_once * BLOCK / THREADS,
        "microseconds": {
            chip: {
                f"{tensors} x {n:,}": {
                    "optfuse": round(ours(chip, tensors, n, DTYPES[dtype], traffic, at_once), 1),
                    "stock": round(stock(chip, tensors, n, traffic), 1) if rule in FUSED else None,
                }
                for tensors, n in SIZES
            }
            for chip in CHIPS
        },
    }


def compared(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The model beside what an H200 took (benchmarks/results). Near: within a quarter."""
    by_name = {(one["rule"], one["dtype"]): one for one in rows}
    found = []
    results = HERE.parents[3] / "benchmarks" / "results"

    def add(what: str, model: float, took: float) -> None:
        near = 0.8 < model / took < 1.25
        found.append({"what": what, "model": round(model, 1), "took": round(took, 1), "near": near})

    for one in json.loads((results / "kernels-adamw-h200.json").read_text("utf-8"))["raced"]:
        times = by_name["adam", "float32"]["microseconds"]["H200"]  # type: ignore[index]
        for name, ours_name in (("optfuse", "optfuse"), ("fused", "stock")):
            took = one["ms"][name]["median"] * 1000
            add(f"AdamW {one['shape']}, {name}", times[one["shape"]][ours_name], took)
    run = json.loads((results / "gpu-run-h200.json").read_text("utf-8"))
    for rule, dtype, elements, tensors, speed, _ in run["bandwidth"]["rows"]:
        this = by_name[rule, dtype]
        traffic = float(str(this["bytes_read"])) + float(str(this["bytes_written"]))
        at_once = int(str(this["blocks_at_once"]))
        model = ours("H200", tensors, elements // tensors, DTYPES[dtype], traffic, at_once)
        took = elements * traffic / speed / 1000
        add(f"{rule} {dtype}, {tensors} x {elements // tensors:,}", model, took)
    return found


def main() -> None:
    nvcc, include, ptx, out = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    ptxas = str(Path(nvcc).resolve().parent / "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, "-isystem", include]
        used, objects = {}, []
        for rule in RULES:
            for dtype in DTYPES:
                source = ptx / f"{rule}-{dtype}.ptx"
                used[rule, dtype] = registers(ptxas, source, Path(folder))
                code = Path(folder) / f"{rule}-{dtype}.c"
                code.write_text(counting(source.read_text("utf-8")), "utf-8")
                objects.append(code.with_suffix(".o"))
                subprocess.run(["cc", *flags, "-c", code, "-o", objects[-1]], check=True)
        program = Path(folder) / "traffic"
        subprocess.run(
            [
                "cc",
                *flags,
                "-o",
                program,
                HERE / "traffic.c",
                HERE.parents[1] / "bench.c",
                *SOURCES,
                *objects,
                *linked(sys.argv[5:]),
            ],
            check=True,
        )
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    counted = [line.split() for line in lines.splitlines()]
    rows = [
        row(rule, dtype, [float(value) for value in values], used[rule, dtype])
        for rule, dtype, *values in counted
        if dtype in DTYPES
    ]
    chips = {chip: dict(zip(("multiprocessors", "tb_per_s", "share"), values, strict=True))
             for chip, values in CHIPS.items()}  # fmt: skip
    model = {"section": "traffic-model", "chips": chips, "start_us": START, "round_us": ROUND,
             "stock": STOCK, "compared": compared(rows), "rows": rows}  # fmt: skip
    out.write_text(as_text(model) + "\n", "utf-8")


if __name__ == "__main__":
    main()
