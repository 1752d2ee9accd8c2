# SPDX-License-Identifier: BSD-3-Clause
"""Breaks nvcc's PTX, one instruction at a time, and counts what the kernels' check sees.

    mutants.py INCLUDE PTX_FOLDER CHIP OUT LIBRARIES...

PTX_FOLDER has INSTANCE-CHIP.ptx; LIBRARIES are the translated kernels and the yardstick. All
mutants of sgd's kernels for small tables (those for large ones have the same text), and a fixed
2,200 of others. OUT is a table of JSON; the status is 1 where fewer are seen than LEAST."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from liveness import NO_RESULT, live, loop_heads, registers
from mutate import text_of
from parts import FLAGS, HERE, SOURCES, as_text, linked
from ptx_text import Function, Instruction, functions

SEED, LEAST, MOST_EXCUSED = 46, 0.95, 0.1
LONG = 12  # inputs of long tensors for samples
ALL = [("sgd", dtype, f"of_cuda_sgd_{dtype}_{used}_small")
       for dtype in ("float32", "bfloat16", "float64", "float16") for used in (1, 0)]  # fmt: skip
SAMPLES = [
    ("adam", "float32", "of_cuda_adam_float32_3_small", 200),
    ("adam", "bfloat16", "of_cuda_adam_bfloat16_7_small", 200),
    ("lion", "float32", "of_cuda_lion_float32_1_small", 200),
    ("lion", "bfloat16", "of_cuda_lion_bfloat16_1_small", 200),
    ("programs", "float32", "of_cuda_programs_float32_255_small", 400),
    ("packing", "float32", "of_cuda_packing_unpack_float32", 150),
    ("packing", "float32", "of_cuda_packing_add_float32", 150),
    ("packing", "float64", "of_cuda_packing_merge_float64", 100),
    ("scaling", "float32", "of_cuda_scaling_float32_0_small", 300),
    ("scaling", "bfloat16", "of_cuda_scaling_bfloat16_0_small", 300),
]
# Why a mutant that runs changes nothing, by its instruction's text.
FOURS = "elements one by one of a tensor that is taken in fours: a chunk is a multiple of four"
UNREACHED = {
    "sgd": f"no input comes there: {FOURS}; the fourth lane of a step that is split",
    "adam": f"no input comes there: powf of bases outside of [0, 1), infinities, NaNs; {FOURS}",
    "lion": "no input comes there: found_inf, and L2 decay, which Lion has not",
    "scaling": "no input comes there: found_inf and loss scales, which scaling has not",
}
# A program's registers and operators are found by comparing their numbers with known ones.
NEVER = "it counts for numbers only that no instruction has: the host refuses them (code.c)"
FIRST = "a program reads no register before there is something in it"
ZERO = "0f00000000"
LANE = "which lane an element is counts in fours only, and there lanes 0 to 2 take the same way"
SPLIT = "where vectors end and single elements begin changes no bit"
BY_ONE = "a division by 1, which stands for no loss scale"
TWICE = "what two blocks or two threads compute has the same bits: a gradient is only read"
SAME = "both registers hold the same address: a global one is its generic one"
ANY = {
    r"^and\.b64 %rd\d+, %rd\d+, -[248] ": SPLIT,
    r"^cvta\.to\.global\.u64 ": SAME,
    r"^ld\.global\.f(32|64) %\w+, \[%rd\d+\] -> ": SAME,
}
NOT_SPLIT = (
    "of float64 a step is split without momentum only, and this kernel has it: nothing of that "
    "condition counts"
)
EQUIVALENT = {
    "of_cuda_sgd_float64_1_small": dict.fromkeys(
        (
            r"^and\.b64 %rd\d+, %rd50, 31 ",
            r"^or\.b64 %rd(65|112|29), ",
            r"^setp\.eq\.s64 %p(20|69|48), ",
            r"^setp\.ne\.s16 %p\d+, %rs1, 0 ",
            r"^setp\.ne\.s64 %p\d+, %rd14, 0 ",
            r"^setp\.eq\.f64 %p\d+, %fd8, ",
            r"^and\.pred ",
        ),
        NOT_SPLIT,
    ),
    "of_cuda_programs_float32_255_small": {
        r"^setp\.nan\.f32 %p575, %f1857, %f1857 -> ": "the larger one is NaN where b is",
    },
    "of_cuda_scaling_float32_0_small": {
        r"^(sub|add)\.s64 %rd(43|58|59), ": TWICE,
        r"^setp\.lt\.u64 %p(8|17), ": TWICE,
        r"^selp\.b64 %rd60, ": TWICE,
        r"^mov\.u64 %rd73, %rd15 ": TWICE,
        r"^or\.b64 %rd45, ": SPLIT,
        r"^mov\.f32 %f42, 0f3F800000 ": BY_ONE,
    },
    "of_cuda_scaling_bfloat16_0_small": {
        r"^setp\.lt\.u64 %p8, ": TWICE,
        r"^mov\.u64 %rd58, %rd13 ": TWICE,
        r"^setp\.eq\.s64 %p9, ": SPLIT,
        r"^and\.b64 %rd48, %rd47, 15 -> .*, 14$": "elements are at multiples of 2",
        r"^cvt\.rn\.bf16\.f32 %rs(80|83|86|89|97), ": "the number has 16 bits already",
        r"^st\.global\.u16 \[%rd28\], %rs97 ": "the number has 16 bits already",
    },
    "scaling": {
        r"^@%p7 bra .* -> @%p6 ": BY_ONE,
        r"^setp\.lt\.u32 %p3, %r\d+, 2 -> .*, 1$": "the first of one tensor needs no search",
        r"^setp\.(ne|eq)\.s64 %p\d+, %rd12, 0 ": "the factor is always there",
        r"^@%p\d+ bra .*: (negated|removed)$": BY_ONE,
    },
    "sgd": {
        r"^and\.b64 %rd\d+, %rd\d+, 7 ": "in vectors all arrays are at multiples of 16",
        r"^shr\.u64 %rd\d+, %rd\d+, 9 ": LANE,
        r"^selp\.b64 %rd\d+, %rd\d+, %rd\d+, %p\d+ ": LANE,
        r"^and\.b64 %rd\d+, %rd\d+, 3 ": LANE,
        r"^setp\.ne\.s64 %p\d+, %rd\d+, 3 ": LANE,
        r"^add\.s64 %rd\d+, %rd\d+, [123] ": LANE,
    },
}


def reason(rule: str, kernel: str, line: str) -> str:
    """The reason why a mutant may survive; empty: there is none."""
    if line.startswith("unreached "):
        return UNREACHED.get(rule, "")
    what = line.split(": ", 1)[1]
    known = ANY | EQUIVALENT.get(rule, {}) | EQUIVALENT.get(kernel, {})
    return next((why for text, why in known.items() if re.search(text, what)), "")


def results(function: Function, text: str) -> set[str]:
    """The registers that an instruction writes."""
    match = re.search(r" (\{[^}]*\}|%\w+)", text)
    return set(registers(function, match[1])) if match else set()


def never_read(code: list[Instruction], function: Function, log: str) -> set[str]:
    """Lines of survivors whose results are read by no way that an input goes; and of conditions
    that always hold, left out."""
    ways = {int(at): way == "true" for at, way in
            re.findall(r"^  instruction (\d+): always (\w+)$", log, re.MULTILINE)}  # fmt: skip
    _, _, behind = live(function, ways)
    found = set()
    for line, at, change in re.findall(r"^(survived (\d+) \w+: (\w.* -> .*))$", log, re.MULTILINE):
        changed = set().union(*(results(function, text) for text in change.split(" -> ")))
        if code[int(at)].parts[0] not in NO_RESULT and not changed & behind[int(at)]:
            found.add(line)
    for line, at in re.findall(r"^(survived (\d+) predicate: .*: removed)$", log, re.MULTILINE):
        if ways.get(int(at)):
            found.add(line)
    return found


def is_zero(code: list[Instruction], function: Function, at: int, register: str) -> bool:
    """Whether moves have put 0 into a register, by the instructions in front of it in its loop."""
    heads = loop_heads(function)
    while at not in heads and at > 0:
        at -= 1
        one = code[at]
        if one.parts[0] not in NO_RESULT and register in results(function, text_of(one)):
            source = one.operands[-1]
            return one.op == "mov.f32" and (source == ZERO or is_zero(code, function, at, source))
    return False


def first_values(code: list[Instruction], function: Function, log: str) -> set[str]:
    """Lines of survivors that put something else than 0 where the program has no number yet."""
    moves = re.findall(r"^(survived (\d+) \w+: mov\.f32 (%f\d+), (%\w+) -> mov\.f32 \3, .*)$", log,
                       re.MULTILINE)  # fmt: skip
    return {line for line, at, _, source in moves if is_zero(code, function, int(at), source)}


def row(rule: str, function: Function, log: str) -> dict[str, object]:
    kernel = function.name
    kinds = {kind: (int(killed), int(all_)) for kind, killed, all_ in
             re.findall(r"^total (\w+) (\d+) (\d+)$", log, re.MULTILINE)}  # fmt: skip
    left = [line for line in log.splitlines() if line.startswith(("survived ", "unreached "))]
    known = dict[str, str]()
    if rule == "programs":
        code = live(function)[0]
        known |= dict.fromkeys(first_values(code, function, log), FIRST)
        known |= dict.fromkeys(never_read(code, function, log), NEVER)
    reasons = Counter(known.get(line) or reason(rule, kernel, line) for line in left)
    survived = reasons.pop("", 0)
    return {
        "kernel": kernel,
        "mutants": sum(all_ for _, all_ in kinds.values()),
        "killed": sum(killed for killed, _ in kinds.values()),
        "survived": survived,
        "excused": dict(reasons),
        "kinds": {kind: {"killed": killed, "of": of} for kind, (killed, of) in kinds.items()},
    }


@dataclass(frozen=True)
class Build:
    folder: Path
    include: str
    ptx: Path
    chip: str
    libraries: list[str]


def check(build: Build, rule: str, dtype: str, kernel: str, sample: int = 0) -> dict[str, object]:
    code, program = build.folder / f"{kernel}.c", build.folder / kernel
    source = build.ptx / f"{rule}-{dtype}-{build.chip}.ptx"
    chosen = [str(sample), str(SEED)] if sample else []
    compiler = os.environ.get("CC", "cc").split()
    others = [one for one in build.libraries if not re.search(rf"ptx-\d+-{rule}-{dtype}-", one)]
    for command in (
        [sys.executable, HERE / "mutate.py", source, kernel, code, *chosen],
        [*compiler, *FLAGS, "-isystem", build.include, "-o", program, code,
         HERE / "mutants_check.c", HERE / "mutant_inputs.c", *SOURCES, *linked(others)],
    ):  # fmt: skip
        subprocess.run([str(word) for word in command], check=True)
    command = [program, rule, dtype, str(LONG if sample else 0)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    texts = functions(source.read_text("utf-8"))
    made = row(rule, next(one for one in texts if one.name == kernel), run.stdout)
    print(f"{made['killed']} of {made['mutants']} seen: {kernel}", flush=True)
    return made


def table(rows: list[dict[str, object]]) -> dict[str, float]:
    total = {name: sum(int(str(one[name])) for one in rows)
             for name in ("mutants", "killed", "survived")}  # fmt: skip
    excused = total["mutants"] - total["killed"] - total["survived"]
    seen = total["killed"] / (total["mutants"] - excused)
    return {**total, "excused": excused, "seen": round(seen, 4)}


def main() -> None:
    include, ptx, chip, out, *libraries = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        build = Build(Path(name), include, Path(ptx), chip, libraries)
        parts = {
            title: list(pool.map(lambda one: check(build, *one), some))
            for title, some in (("sgd, all", ALL), (f"2,200 of others, seed {SEED}", SAMPLES))
        }
    made = {title: {**table(rows), "kernels": rows} for title, rows in parts.items()}
    Path(out).write_text(as_text({"section": "ptx-mutants", **made}) + "\n", "utf-8")
    for title, rows in parts.items():
        found = table(rows)
        print(title, found)
        if found["seen"] < LEAST or found["excused"] > MOST_EXCUSED * found["mutants"]:
            sys.exit("too few are seen, or too many are excused")


if __name__ == "__main__":
    main()
