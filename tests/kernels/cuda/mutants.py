# SPDX-License-Identifier: BSD-3-Clause
"""Breaks the CUDA kernels and the code that launches them, one line at a time,
and expects device_check to see each of it.

    mutants.py CUDA_INCLUDE LIBRARIES...
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent.parent.parent
BESIDE = [TESTS.parent / name for name in ("arrays.c", "packing_memory.c", "random_program.c")]
CC = os.environ.get("CC", "cc").split()
CXX = os.environ.get("CXX", "c++").split()
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
LAUNCHER = ["driver.c", "launch.c", "common.c", "images.c", "advance.c", "asgd_next.c", "capture.c"]
LAUNCHER += ["code.c", "draw.c", "packing.c"]


@dataclass(frozen=True)
class Mutant:
    what: str
    file: str
    old: str
    new: str
    flags: tuple[str, ...] = ()
    dtype: str = "float32"  # of the instance that is broken
    rule: str = "adam"


UPDATE, LAUNCH, TENSOR = "cuda/update.cu", "cuda/launch.c", "cuda/tensor.cuh"
BLOCK = "cuda/block.cuh"
PROGRAM, CODE = "cuda/program.cu", "cuda/code.c"
PACKING, ROUNDED = "cuda/packing.cu", "cuda/rounded.cu"
DRAW = "cuda/draw.cu"
OP_BY_OP, ELEMENT, OPERATORS = "cuda/op_by_op.cu", "cuda/op_by_op_element.h", "rules/aten_cuda.h"
SOURCES = {"programs": PROGRAM, "packing": PACKING, "adamw": ROUNDED, "draw": DRAW}
FORMS = {name: f"{name}_foreach" for name in ("nadam", "adagrad", "asgd")}
LISTS = ("VARIANTS", "ROOTS", "N_STATE")
MULTIPLY = "    of_multiply(&packs.grad, block.factor);\n"
LANES = """#pragma unroll
    for (int lane = 0; lane < N; lane++) {
        of_element e = of_get_element(packs, lane);
"""
UNROUNDED = LANES + "        e.grad = block.factor.given ? e.grad * block.factor.by : e.grad;\n"
MUTANTS = [
    Mutant("the search is off by one", TENSOR, "STRIDE - 1] <= block", "STRIDE - 1] < block"),
    Mutant("one element too many", BLOCK, "i < end; i +=", "i <= end; i +="),
    Mutant("a vector over the end", BLOCK, "end - end % OF_LANES", "end + OF_LANES - 1"),
    Mutant("chunks overlap", BLOCK, ": at + common.chunk;", ": at + common.chunk + 4;"),
    Mutant("blocks are some elements apart", BLOCK, ") * common.chunk;", ") * 8192;"),
    Mutant("vectors anywhere", BLOCK, "if (of_aligned<USED>(tensor, 16))", "if (true)"),
    Mutant("alignment of the state ignored", TENSOR, "if (USED >> i & 1)\n            all |=",
           "if (USED >> i & 8)\n            all |="),
    Mutant("the rest is left out", BLOCK, "at = packed;", "at = end;"),
    Mutant("found_inf is ignored", BLOCK, "*common.found_inf_at == 1.0f", "false"),
    Mutant("the factor is ignored", UPDATE, MULTIPLY, ""),
    Mutant("the factor is ignored beside a scale", UPDATE, MULTIPLY,
           "if (!block.scaled)" + MULTIPLY),
    Mutant("the product is not rounded to the dtype", UPDATE, MULTIPLY + LANES,
           UNROUNDED, (), "bfloat16"),
    Mutant("the factor is not handed over", "cuda/common.c", "= update->factor_at;", "= NULL;"),
    Mutant("the device's step is ignored", "cuda/step_scalars.cuh", "if (common.steps_on_device)",
           "if (common.runs_programs)"),
    Mutant("one product is rounded", "rules/adam.h", "of_multiply_add(true, -k->beta1",
           "of_multiply_add(false, -k->beta1"),
    Mutant("another lane's product is rounded", "rules/adam.h", "lane == 0", "lane == 1"),
    Mutant("lanes always lie side by side", "cuda/lane.h", "quad ? at : at / THREADS", "at"),
    Mutant("the compiler fuses products", UPDATE, "", "", ("-ffp-contract=fast", "-mfma")),
    Mutant("a quotient is not corrected", "rules/real.h", "? corrected : quotient",
           "? quotient : quotient", (), "bfloat16"),
    Mutant("mixed, biases are corrected in float", "cuda/step_scalars.cuh",
           "typedef double of_correcting", "typedef of_real of_correcting", rule="adam_mixed"),
    Mutant("mixed, halves of the state's last bit go up", "cuda/element.cuh",
           "return of_bfloat16_narrow(value);",
           "return (of_stored_state)((of_bits_of_float(value) + 0x8000u) >> 16);",
           rule="adam_mixed"),
    Mutant("mixed, the state lies as the parameter", TENSOR, ") * SMALLER;", ");",
           rule="adam_mixed"),
    Mutant("mixed, the state is anywhere", "cuda/common.c", "sizeof(uint16_t)}",
           "sizeof(uint64_t)}", rule="adam_mixed"),
    Mutant("one entry too many", LAUNCH, "(common->entries + 1) * c->stride >",
           "common->entries * c->stride >"),
    Mutant("the last block is forgotten", LAUNCH, "(first[-1] + chunk - 1) / chunk",
           "first[-1] / chunk"),
    Mutant("all entries have one block", LAUNCH, "blocks += (first", "blocks = (first"),
    Mutant("a small table for many", LAUNCH, "OF_CUDA_WORDS(OF_CUDA_SMALL_BYTES) ?",
           "OF_CUDA_WORDS(OF_CUDA_LARGE_BYTES) ?"),
    Mutant("steps are mixed", LAUNCH, "if (full || other ||", "if (full ||"),
    Mutant("op by op, the product is rounded", OPERATORS, "of_multiply_add(true, w, way, self)",
           "of_multiply_add(false, w, way, self)", rule="nadam"),
    Mutant("a value of 1 is like all others", OPERATORS,
           "if (factor == (of_real)1)\n        return aten_round(of_multiply_add",
           "if (factor == (of_real)2)\n        return aten_round(of_multiply_add",
           rule="adagrad"),
    Mutant("op by op, decay is left out", ELEMENT, "if (update->decays)", "if (false)",
           rule="nadam"),
    Mutant("scalars are not rounded", ELEMENT, "(double)of_rounded(numbers[i]);",
           "(double)of_rounded(numbers[i]) * (1 + 1e-7);", rule="nadam"),
    Mutant("op by op, the factor is ignored", OP_BY_OP, MULTIPLY, "", rule="nadam"),
    Mutant("op by op, the rest is left out", BLOCK, "at = packed;", "at = end;", rule="nadam"),
    Mutant("op by op, chunks overlap", BLOCK, ": at + common.chunk;",
           ": at + common.chunk + 4;", rule="adagrad"),
    Mutant("the last scalar is lost", "cuda/common.c", "update->hyper, known->bytes);",
           "update->hyper, known->bytes - 8);", rule="adagrad"),
    Mutant("a tensor's numbers are exchanged", OP_BY_OP, "*tensor.number[asgd_eta], *tensor",
           "*tensor.number[asgd_mu], *tensor", rule="asgd"),
    Mutant("a tensor's numbers are not converted", "rules/asgd_foreach.h",
           "(double)aten_round((of_real)eta)", "eta", (), "bfloat16", "asgd"),
    Mutant("an entry has no room for numbers", LAUNCH, "popcount(c.state.used) + numbers;",
           "popcount(c.state.used);", rule="asgd"),
    Mutant("the next numbers are not made", LAUNCH, "status == OF_CUDA_OK && numbers ?",
           "status == OF_CUDA_OK && !numbers ?", rule="asgd"),
    Mutant("only the first next numbers are made", "cuda/asgd_next.c",
           "if (table.n < OF_CUDA_NUMBERS && i + 1 < n_entries)",
           "if (table.n < OF_CUDA_NUMBERS)", rule="asgd"),
    Mutant("the next numbers are made with another option", "cuda/asgd_next.c", ".alpha = s.alpha",
           ".alpha = s.lr", rule="asgd"),
    Mutant("programs, the factor is ignored", PROGRAM,
           "of_scale(&row[OF_REGISTER_GRAD], of_factor_of(common));", ";", rule="programs"),
    Mutant("programs, a third input is not read", PROGRAM, "= inputs > 2 ?", "= inputs > 3 ?",
           rule="programs"),
    Mutant("programs, vectors anywhere", PROGRAM, "packed = aligned &&", "packed = true &&",
           rule="programs"),
    Mutant("programs, one element too many", PROGRAM,
           "            pack.lane[i] = of_narrow(row.lane[lane + i]);\n"
           "        if (N > 1 || threadIdx.x + further < place.n)",
           "            pack.lane[i] = of_narrow(row.lane[lane + i]);\n"
           "        if (N > 1 || threadIdx.x + further <= place.n)", rule="programs"),
    Mutant("programs, what is only read is stored", PROGRAM, "if (common.writes >> k & 1)",
           "if (common.reads >> k & 1)", rule="programs"),
    Mutant("programs, later arrays are not loaded", PROGRAM, "if (!(common.reads >> first))",
           "if (first)", rule="programs"),
    Mutant("programs, vectors of a thread are neighbours", PROGRAM,
           "to[lane / OF_LANES * OF_CUDA_PROGRAM_THREADS]", "to[lane / OF_LANES]",
           rule="programs"),
    Mutant("programs, rows overlap", PROGRAM, "number * OF_ROW_VECTORS",
           "number * (OF_ROW_VECTORS / 2)", rule="programs"),
    Mutant("programs, no row for a result", CODE, "{q->to, q->a, q->b, q->c};\n    unsigned rows",
           "{q->a, q->a, q->b, q->c};\n    unsigned rows", rule="programs"),
    Mutant("programs, a number divides as on lists", OPERATORS,
           "aten_mul(self, (of_real)reciprocal)",
           "aten_div(self, (of_real)1 / (of_real)reciprocal)", rule="programs"),
    Mutant("programs, a product is rounded", OPERATORS,
           "of_multiply_add(true, factor, a * b, self)",
           "of_multiply_add(false, factor, a * b, self)", rule="programs"),
    Mutant("programs, a divisor is no reciprocal", CODE, "of_gpu_numbers(q, wide);",
           "wide[0] = q->s, wide[1] = q->t;", rule="programs"),
    Mutant("programs, one number twice", CODE, "(float)wide[0], (float)wide[1]",
           "(float)wide[0], (float)wide[0]", rule="programs"),
    Mutant("programs, entries begin in the program", LAUNCH, "c->table.words + c->code + (i + 1)",
           "c->table.words + (i + 1)", rule="programs"),
    Mutant("rounding, the compiler fuses products", ROUNDED, "", "",
           ("-ffp-contract=fast", "-mfma"), rule="adamw"),
    Mutant("rounding, two lanes have one's integers", ROUNDED, "chunk * OF_DRAW_LANES + lane,",
           "chunk * OF_DRAW_LANES + lane / 2,", (), "bfloat16", "adamw"),
    Mutant("rounding, a chunk has another's integers", ROUNDED, "chunk * OF_DRAW_LANES + lane,",
           "(chunk & 15) * OF_DRAW_LANES + lane,", (), "float16", "adamw"),
    Mutant("rounding, the halves of a word are exchanged", ROUNDED, "word >> row %",
           "word >> (row + 1) %", (), "bfloat16", "adamw"),
    Mutant("rounding, two rows have one word", ROUNDED, "words[row / OF_HALVES];",
           "words[row / OF_HALVES / 2 * 2];", (), "float16", "adamw"),
    Mutant("rounding, a state tensor has the other's integers", ROUNDED,
           "of_draw_of(words[1 + i], row)", "of_draw_of(words[1], row)", (), "bfloat16", "adamw"),
    Mutant("rounding, all parameters have one number", ROUNDED, "tensor.step >> 32", "0", (),
           "bfloat16", "adamw"),
    Mutant("rounding, the number is not handed over", LAUNCH, "entry->parameter << 32 | bits",
           "bits", (), "bfloat16", "adamw"),
    Mutant("rounding, state lies as the parameter", "cuda/common.c", "= update->wide_state;",
           "= false;", (), "bfloat16", "adamw"),
    Mutant("rounding, the factor's product is not rounded", ROUNDED,
           "of_widen(of_narrow(e[row].grad * block.factor.by));",
           "e[row].grad * block.factor.by;", (), "bfloat16", "adamw"),
    Mutant("rounding, elements of the next block, too", ROUNDED, "part.end);\n        else",
           "part.tensor.n);\n        else", (), "bfloat16", "adamw"),
    Mutant("rounding, a last chunk of one element is left out", ROUNDED,
           "chunk * OF_CHUNK < part.end;", "chunk * OF_CHUNK + 1 < part.end;", (), "float16",
           "adamw"),
    Mutant("integers, one too many", DRAW, "at - draws.first < draws.n",
           "at - draws.first <= draws.n", rule="draw"),
    Mutant("integers, the halves of a word are exchanged", DRAW, ">> half * 16",
           ">> (1 - half) * 16", rule="draw"),
    Mutant("integers, the last chunk has no block", "cuda/draw.c", ">> shift) + 1)", ">> shift))",
           rule="draw"),
    Mutant("packing, the middle row is added twice", PACKING, "if (last != first)", "if (true)",
           rule="packing"),
    Mutant("packing, one element too many", PACKING, "for (; at < n;", "for (; at <= n;",
           rule="packing"),
    Mutant("packing, four over the end", PACKING, "at + round - blockDim.x < n", "at < n",
           rule="packing"),
    Mutant("packing, what is between rows is added", PACKING, "row * table.ld + row;",
           "row * table.n + row;", rule="packing"),
    Mutant("packing, the compiler fuses products", PACKING, "", "",
           ("-ffp-contract=fast", "-mfma"), rule="packing"),
    Mutant("packing, a number is not rounded", PACKING, "static_cast<of_stored>(table.numbers[1])",
           "static_cast<of_stored>(table.numbers[1] * (1 + 1e-7))", rule="packing"),
    Mutant("packing, the last is not merged", PACKING, "to[at] : 0;", "to[at + 1] : 0;",
           rule="packing"),
    Mutant("packing, a row of tiles is left out", PACKING, "at < tiles - first ?",
           "at + 1 < tiles - first ?", rule="packing"),
    Mutant("packing, the lower half has the diagonal", PACKING, "column < row && row < table.n",
           "column <= row && row < table.n", rule="packing"),
    Mutant("packing, the lower half is not turned", PACKING, "copy[x][y + i * OF_TILE_STEP];",
           "copy[y + i * OF_TILE_STEP][x];", rule="packing"),
    Mutant("packing, damping goes everywhere", PACKING, "if (row == column)", "if (true)",
           rule="packing"),
    Mutant("packing, the last tiles have no block", "cuda/packing.c",
           "(tiles + 1) / 2 * (tiles + 1)", "tiles / 2 * (tiles + 1)", rule="packing"),
    Mutant("packing, the last elements have no block", "cuda/packing.c",
           "(packing->n + OF_CUDA_MERGED - 1)", "packing->n", rule="packing"),
]  # fmt: skip


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


class Build:
    def __init__(self, folder: Path, include: str, libraries: list[str]) -> None:
        self.folder, self.libraries = folder, libraries
        self.tree = folder / "kernels"
        shutil.copytree(ROOT / "kernels", self.tree)
        self.includes = [f"-I{self.tree}", f"-I{TESTS}", f"-I{TESTS.parent}", f"-isystem{include}"]
        tests = ("device_check.c", "packing_check.c", "batch.c", "host_driver.c")
        self.objects = [self.c(path) for path in [*(TESTS / f for f in tests), *BESIDE]]
        self.launcher = {name: self.c(self.tree / "cuda" / name) for name in LAUNCHER}
        self.kernels: dict[tuple[str, str], Path] = {}  # unbroken

    def c(self, path: Path, name: str = "") -> Path:
        out = self.folder / (name or f"{path.stem}.o")
        flags = ["-std=gnu11", "-O1", "-D_GNU_SOURCE", *EXACT, *self.includes]
        run(*CC, *flags, "-c", path, "-o", out)
        return out

    def kernel(self, rule: str, dtype: str, name: str, *flags: str) -> Path:
        """A rule in this dtype; it takes the place of the library's."""
        out = self.folder / name
        macros = [f"-DOF_RULE={rule}", f"-DOF_RULE_{rule.upper()}"]
        macros += [f"-DOF_DTYPE={dtype}", f"-DOF_DTYPE_{dtype.upper()}", "-DOF_ISA=cuda"]
        macros += [f"-DOF_{name}={rule.upper()}_{name}" for name in (*LISTS, "SETS")]
        form = FORMS.get(rule, rule)
        macros += [f'-DOF_RULE_HEADER="../rules/{form}.h"']
        macros += [f"-DOF_FORM={form}"] if rule in FORMS else []
        macros += ["-DOF_RUNS_PROGRAMS"] if rule == "programs" else []
        macros += ["-DOF_STATE_BFLOAT16"] if rule == "adam_mixed" else []
        source = SOURCES.get(rule, OP_BY_OP if rule in FORMS else UPDATE)
        macros += [f'-DHOST_SOURCE="{source}"']
        run(*CXX, "-std=c++17", "-O2", *EXACT, *flags, *macros, *self.includes,
            "-c", TESTS / "host_update.cpp", "-o", out)  # fmt: skip
        return out

    def unbroken(self, rule: str, dtype: str) -> Path:
        if (rule, dtype) not in self.kernels:
            self.kernels[rule, dtype] = self.kernel(rule, dtype, f"{rule}-{dtype}.o")
        return self.kernels[rule, dtype]

    def survives(self, mutant: Mutant | None, unbroken: str = "adam") -> bool:
        """Whether device_check is content with it."""
        rule = mutant.rule if mutant else unbroken
        path = self.tree / mutant.file if mutant else None
        text = path.read_text() if path else ""
        if mutant and mutant.old:
            if text.count(mutant.old) != 1:
                sys.exit(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times")
            path.write_text(text.replace(mutant.old, mutant.new))
        launcher = dict(self.launcher)
        dtype = mutant.dtype if mutant else "float32"
        if path and path.suffix != ".c":
            kernel = self.kernel(rule, dtype, "broken.o", *mutant.flags)
        else:
            kernel = self.unbroken(rule, dtype)
        if path and path.suffix == ".c":
            launcher[path.name] = self.c(path, "broken.o")
        program = self.folder / "check"
        run(*CXX, "-o", program, *self.objects, *launcher.values(), kernel, *self.libraries,
            "-lpthread", "-lm")  # fmt: skip
        if path:
            path.write_text(text)
        arguments = [program, "--rounds", "100", "--only", f"{rule} {dtype}"]
        return subprocess.run(arguments, capture_output=True, timeout=120).returncode == 0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build = Build(Path(folder), sys.argv[1], sys.argv[2:])
        for rule in ("adam", "adam_mixed", *FORMS, *SOURCES):
            if not build.survives(None, rule):
                sys.exit(f"device_check fails on what is not broken: {rule}")
        survived = []
        for mutant in MUTANTS:
            seen = not build.survives(mutant)
            print(f"{'seen' if seen else 'NOT SEEN'}: {mutant.what}", flush=True)
            survived += [] if seen else [mutant.what]
    sys.exit(f"not seen: {survived}" if survived else 0)


if __name__ == "__main__":
    main()
