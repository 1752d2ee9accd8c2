# SPDX-License-Identifier: BSD-3-Clause
"""Reads what nvcc makes of the CUDA kernels: the PTX holds exactly the
operations that the rules write, each rounded as written, and ptxas spills no
register.

    ptx_check.py [--sample] NVCC FOLDER FLAGS... -- INSTANCE SOURCE MACROS... [-- INSTANCE ...]

--sample: the instances of float32 and the first control, for one chip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from optim_entries import ENTRIES

OPERATIONS = ("fma", "mul", "sum", "div", "sqrt")
OP_BY_OP = {name.lower(): entry for name, entry in ENTRIES.items()}
CHIPS = ("sm_90", "sm_75")
SPILLS = ("adam", "adam_mixed", "sgd", "rmsprop", "nadam", "programs", "packing")
# Operations on one element, in that order, by the state in use. All branches count: both
# ways of adding L2 decay (amsgrad has one), of filling SGD's buffer, of taking a
# step. One product is the gradient's by the factor of clipping, one division that
# by the loss scale.
ELEMENT = {
    "adam-float32": {3: (6, 4, 3, 3, 1), 7: (6, 3, 2, 3, 1)},
    "adam-float64": {3: (6, 3, 2, 3, 1), 7: (6, 3, 2, 3, 1)},
    "adam_mixed-float32": {3: (6, 4, 3, 3, 1), 7: (6, 3, 2, 3, 1)},
    "sgd-float32": {0: (2, 2, 1, 1, 0), 1: (5, 4, 1, 1, 0)},
    "sgd-float64": {0: (2, 2, 1, 1, 0), 1: (4, 3, 1, 1, 0)},
    "sgd-bfloat16": {0: (2, 1, 0, 1, 0), 1: (5, 3, 0, 1, 0)},
    "scaling-float32": {0: (0, 1, 0, 1, 0)},
}
# In 16 bits the division by the second correction is a product and two fused ones.
ELEMENT["adam-bfloat16"] = ELEMENT["adam-float16"] = {3: (8, 5, 3, 2, 1), 7: (8, 4, 2, 2, 1)}
ELEMENT["sgd-float16"] = ELEMENT["sgd-bfloat16"]
for dtype in ("float64", "bfloat16", "float16"):
    ELEMENT[f"scaling-{dtype}"] = ELEMENT["scaling-float32"]
# Operations of one block: lr * weight decay, lr / correction, the second correction's
# root; 1 - dampening. The powers are counted on their own.
BLOCK = {3: (0, 1, 0, 1, 1), 7: (0, 1, 0, 1, 1), 0: (0,) * 5, 1: (0, 0, 1, 0, 0)}
# Operations of asgd_next.cu beside its power, with rcp last: three products are powers that need
# none.
NEXT = (0, 5, 2, 0, 1, 2)
# Operations of program.cu, with rcp last: for each element, all operators of operators.def and two
# products with the factor of clipping, for vectors and for single elements; and once, for numbers.
# The inverse root is counted on its own.
PROGRAM, PROGRAM_ONCE = (10, 14, 5, 4, 1, 2), (0, 0, 1, 0, 0, 0)
# Operations of packing.cu: products in a sum, and barriers.
PACKING = {"add": (1, 0), "merge": (2, 0), "unpack": (0, 1)}
PROGRAM_LANES = {"float32": 8, "float64": 4, "bfloat16": 8, "float16": 8}
SCALARS = 12  # roundings of a kernel's scalars to float, at most; there are more elements
# Where powers are in double, as CUDA's library has them in PyTorch (kernels/cuda/meson.build).
CONTRACTED = ("adam-float64", "adam_mixed-float32")
LANES = {"float32": 4, "float64": 2, "bfloat16": 8, "float16": 8}
POWERS = """
extern "C" __global__ void powers(TYPE *out, TYPE a, TYPE b, TYPE step) {
    out[0] = 1 - ::pow(a, step);
    out[1] = 1 - ::pow(b, step);
}
"""
POWER = """
extern "C" __global__ void power(float *out, float x, float exponent) {
    out[0] = ::powf(x, exponent);
}
"""

INVERSE_ROOT = """
extern "C" __global__ void inverse_root(TYPE *out, TYPE x) {
    out[0] = ::rsqrt(x);
}
"""

# Builds that the check has to refuse: an instance, flags, and a change of one file.
CONTROLS = (
    ("adam-float32", ("-fmad=true", "-use_fast_math"), "rules/adam.h",
     "of_multiply_add(true, -k->beta1", "of_multiply_add(false, -k->beta1"),
    ("nadam-float32", ("-fmad=true", "-prec-div=false", "-prec-sqrt=false", "-ftz=true"),
     "rules/aten_cuda.h", "of_multiply_add(true, w, way, self)",
     "of_multiply_add(false, w, way, self)"),
    ("programs-float32", ("-fmad=true", "-prec-div=false"), "rules/aten_cuda.h",
     "of_multiply_add(true, factor, a * b, self)",
     "of_multiply_add(false, factor, a * b, self)"),
    ("asgd_next", ("-fmad=true", "-prec-div=false", "-prec-sqrt=false", "-ftz=true"),
     "", "", ""),
    ("packing-float32", ("-fmad=true", "-ftz=true"), "cuda/packing.cu",
     "    __syncthreads();\n", ""),
)  # fmt: skip


class Compiler:
    def __init__(self, nvcc: str, flags: list[str], folder: Path) -> None:
        self.nvcc, self.flags, self.folder = nvcc, flags, folder
        self.known: dict[tuple[str, ...], str] = {}

    def alone(self, text: str, flags: list[str]) -> str:
        """The body of the one kernel of this text."""
        key = (text, *flags)
        if key not in self.known:
            snippet = self.folder / "alone.cu"
            snippet.write_text(text)
            (self.known[key],) = kernels(self.run(snippet, *flags)[0]).values()
        return self.known[key]

    def run(self, source: Path, *more: str) -> tuple[str, str]:
        out = self.folder / "out"
        command = [self.nvcc, *self.flags, *more, "-o", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return out.read_text(errors="replace"), done.stderr


def kernels(ptx: str) -> dict[str, str]:
    found = re.findall(r"\.entry (\w+)\((.*?)\n}\n", ptx, re.DOTALL)
    return dict(found)


def counts(body: str) -> Counter[str]:
    found = Counter(match[1] for match in re.finditer(r"\b(\w+)(?:\.\w+)*\.f(?:32|64)\s", body))
    found["sum"] = found["add"] + found["sub"]
    return found


def wrongly_rounded(body: str, contracted: bool) -> list[str]:
    """Operations that ptxas may fuse, approximate or flush. CUDA's powf has
    one approximate reciprocal, which it corrects."""
    wrong = []
    for line in body.splitlines():
        match = re.search(r"\b((fma|mul|add|sub|div|sqrt|rcp|ex2|lg2|rsqrt)[\w.]*\.f(32|64))", line)
        if not match:
            continue
        name, parts = match[1], match[1].split(".")
        bare = "rn" not in parts
        if "rcp" in parts and "approx" in parts:
            continue
        if {"approx", "full", "ftz"} & set(parts) or (bare and not contracted):
            wrong.append(name)
    return wrong + (products_in_sums(body) if contracted else [])


def products_in_sums(body: str) -> list[str]:
    """Bare products that go into bare sums: what a compiler may contract."""
    products = set(re.findall(r"\bmul\.f\d\d\s+(%\w+)", body))
    sums = re.findall(r"\b(?:add|sub)\.f\d\d\s+%\w+, (%\w+), (%\w+)", body)
    return [f"{name} in a sum" for pair in sums for name in pair if name in products]


def expected(instance: str, used: int, powers: Counter[str], again: bool) -> Counter[str]:
    """again: with what all elements have in common computed for each of them, which
    compilers do where it saves a register."""
    rule, dtype = instance.split("-")
    elements = LANES[dtype] + 1  # the 16-byte path and the scalar one
    times = elements if again else 1
    total: Counter[str] = Counter()
    for name, each, once in zip(OPERATIONS, ELEMENT[instance][used], BLOCK[used], strict=True):
        of_powers = powers[name] if rule.startswith("adam") else 0
        total[name] = elements * each + once * times + of_powers
    return total


def expected_op_by_op(instance: str, used: int) -> dict[str, range]:
    """How often an operation may occur. A running average's difference may be taken in
    both branches, and 1 - weight at every element."""
    rule, dtype = instance.split("-")
    elements = LANES[dtype] + 1
    each = zip((*OPERATIONS, "rcp"), OP_BY_OP[rule].operations[used], strict=True)
    wanted = {name: range(n * elements, n * elements + 1) for name, n in each}
    extra = OP_BY_OP[rule].lerps.get(used, 0) * 2 * elements
    wanted["sum"] = range(wanted["sum"].start, wanted["sum"].start + extra + 1)
    return wanted


def roundings(body: str) -> list[str]:
    """Each scalar is rounded to float once, and not at every element."""
    rounded = len(re.findall(r"cvt\.rn\.f32\.f64", body))
    return [f"{rounded} roundings of scalars"] if rounded > SCALARS else []


def op_by_op_faults(
    compiler: Compiler, source: Path, instance: str, macros: list[str]
) -> list[str]:
    rule, dtype = instance.split("-")
    found = []
    bodies = kernels(compiler.run(source, "-arch=compute_90", "-ptx", "-fmad=false", *macros)[0])
    if len(bodies) != 2 * len(OP_BY_OP[rule].operations):
        found.append(f"{instance}: {len(bodies)} kernels")
    for name, body in bodies.items():
        have, want = counts(body), expected_op_by_op(instance, int(name.split("_")[-2]))
        different = [
            f"{key} {have[key]} for {list(some)}"
            for key, some in want.items()
            if have[key] not in some
        ]
        different += roundings(body)
        if different:
            found.append(f"{name}: {', '.join(different)}")
        if wrong := wrongly_rounded(body, False):
            found.append(f"{name}: {sorted(set(wrong))}")
    return found


def next_faults(compiler: Compiler, source: Path, macros: list[str]) -> list[str]:
    """Faults of the kernel that makes ASGD's numbers anew."""
    flags = ["-arch=compute_90", "-ptx", "-fmad=false"]
    alone = compiler.alone(POWER, flags)
    body = kernels(compiler.run(source, *flags, *macros)[0])["of_cuda_asgd_next"]
    power, have, found = counts(alone), counts(body), []
    for name, more in zip((*OPERATIONS, "rcp"), NEXT, strict=True):
        if have[name] != power[name] + more:
            found.append(f"asgd_next: {name} {have[name]} for {power[name] + more}")
    if body.count("rcp.approx") != alone.count("rcp.approx"):
        found.append("asgd_next: rcp.approx")
    if wrong := wrongly_rounded(body, False):
        found.append(f"asgd_next: {sorted(set(wrong))}")
    return found


def program_faults(compiler: Compiler, source: Path, instance: str, macros: list[str]) -> list[str]:
    """Faults of the kernel that runs programs."""
    dtype = instance.split("-")[1]
    real = "double" if dtype == "float64" else "float"
    lanes = PROGRAM_LANES[dtype]
    flags = ["-arch=compute_90", "-ptx", "-fmad=false"]
    alone = compiler.alone(INVERSE_ROOT.replace("TYPE", real), flags)
    bodies = kernels(compiler.run(source, *flags, *macros)[0])
    found = [] if len(bodies) == 2 else [f"{instance}: {len(bodies)} kernels"]
    for name, body in bodies.items():
        have, root = counts(body), counts(alone)
        for key, each, once in zip((*OPERATIONS, "rcp"), PROGRAM, PROGRAM_ONCE, strict=True):
            want = lanes * (each + root[key]) + once
            spare = lanes - 1 if key == "sum" else 0  # 1 - weight at every element
            if not want <= have[key] <= want + spare:
                found.append(f"{name}: {key} {have[key]} for {want}")
        if body.count("rsqrt.approx") != lanes * alone.count("rsqrt.approx"):
            found.append(f"{name}: {body.count('rsqrt.approx')} approximate inverse roots")
        wrong = {what for what in wrongly_rounded(body, False) if not what.startswith("rsqrt")}
        found += [f"{name}: {sorted(wrong)}"] if wrong else []
    return found


def packing_faults(compiler: Compiler, source: Path, instance: str, macros: list[str]) -> list[str]:
    """Faults of the kernels that pack. How often a loop was unrolled does not matter."""
    dtype, found = instance.split("-")[1], []
    bodies = kernels(compiler.run(source, "-arch=compute_90", "-ptx", "-fmad=false", *macros)[0])
    for task, (products, barriers) in PACKING.items():
        name = f"of_cuda_packing_{task}_{dtype}"
        body = bodies.pop(name, "")
        have = counts(body)
        others = {key: have[key] for key in ("fma", "div", "sqrt", "rcp") if have[key]}
        if not have["sum"] or have["mul"] != products * have["sum"] or others:
            found.append(f"{name}: {have['sum']} sums of {have['mul']} products, {others}")
        if (n := body.count("bar.sync")) != barriers:
            found.append(f"{name}: {n} barriers for {barriers}")
        if wrong := wrongly_rounded(body, False):
            found.append(f"{name}: {sorted(set(wrong))}")
    return found + [f"{name} is unknown" for name in bodies]


def faults(compiler: Compiler, source: Path, instance: str, macros: list[str]) -> list[str]:
    """The faults in the PTX of one instance."""
    if instance.startswith("packing-"):
        return packing_faults(compiler, source, instance, macros)
    if instance == "asgd_next":
        return next_faults(compiler, source, macros)
    if instance.startswith("programs-"):
        return program_faults(compiler, source, instance, macros)
    if instance.split("-")[0] in OP_BY_OP:
        return op_by_op_faults(compiler, source, instance, macros)
    contracted = instance in CONTRACTED
    flags = ["-arch=compute_90", "-ptx", f"-fmad={'true' if contracted else 'false'}"]
    real = "double" if contracted else "float"
    powers = counts(compiler.alone(POWERS.replace("TYPE", real), flags))
    found = []
    bodies = kernels(compiler.run(source, *flags, *macros)[0])
    if len(bodies) != 2 * len(ELEMENT[instance]):
        found.append(f"{instance}: {len(bodies)} kernels")
    for name, body in bodies.items():
        used = int(name.split("_")[-2])
        have, want = counts(body), expected(instance, used, powers, again=False)
        if have["sum"] == (other := expected(instance, used, powers, again=True))["sum"]:
            want["sum"] = other["sum"]
        different = [
            f"{key} {have[key]} for {want[key]}" for key in OPERATIONS if have[key] != want[key]
        ]
        different += roundings(body)
        if different:
            found.append(f"{name}: {', '.join(different)}")
        if wrong := wrongly_rounded(body, contracted):
            found.append(f"{name}: {sorted(set(wrong))}")
    return found


def spills(compiler: Compiler, source: Path, chip: str, macros: list[str]) -> list[str]:
    options = [f"-arch={chip}", "-cubin", "-Xptxas", "-v", "-fmad=false"]
    log = compiler.run(source, *options, *macros)[1]
    bytes_spilled = re.findall(r"(\d+) bytes spill", log)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    print(f"     {chip}: {max(registers)} registers at most, {set(bytes_spilled)} bytes spilled")
    return [] if set(bytes_spilled) == {"0"} else [f"{chip} spills: {bytes_spilled}"]


def changed(compiler: Compiler, source: Path, file: str, old: str, new: str) -> Path:
    """The source in a copy of the tree with one file changed."""
    tree = compiler.folder / "kernels"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(source.parent.parent, tree)
    text = (tree / file).read_text()
    if text.count(old) != 1:
        sys.exit(f"{file} has {old!r} {text.count(old)} times")
    (tree / file).write_text(text.replace(old, new))
    return tree / "cuda" / source.name


def must_fail(compiler: Compiler, source: Path, instance: str, macros: list[str],
              options: tuple[str, ...], file: str, old: str, new: str) -> list[str]:  # fmt: skip
    """Controls: builds that the check has to refuse."""
    missed = []
    for flag in options:
        found = faults(compiler, source, instance, [*macros, flag])
        print(f"control {instance} {flag}:", *(found[:1] or ["NOT SEEN"]))
        missed += [] if found else [f"a build of {instance} with {flag} was accepted"]
    if not file:
        return missed
    found = faults(compiler, changed(compiler, source, file, old, new), instance, macros)
    print(f"control {instance}, {old.strip()!r} is {new!r}:", *(found[:1] or ["NOT SEEN"]))
    return missed + ([] if found else [f"{instance} with a change of {old!r} was accepted"])


def main() -> None:
    sample = sys.argv[1] == "--sample"
    nvcc, folder, *rest = sys.argv[1 + sample :]
    groups: list[list[str]] = [[]]
    for word in rest:
        groups.append([]) if word == "--" else groups[-1].append(word)
    flags = groups[0]
    instances = {name: (Path(folder) / source, macros) for name, source, *macros in groups[1:]}
    if sample:
        instances = {k: v for k, v in instances.items() if k.endswith(("float32", "next"))}
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        compiler = Compiler(nvcc, flags, Path(temporary))
        for instance, (source, macros) in instances.items():
            found = faults(compiler, source, instance, macros)
            print(f"{'FAIL' if found else 'ok  '} {instance}", *found, sep="\n     ", flush=True)
            failed += found
            if instance.split("-")[0] in SPILLS and instance.endswith(("float32", "bfloat16")):
                for chip in CHIPS[:1] if sample else CHIPS:
                    failed += spills(compiler, source, chip, macros)
        for instance, options, file, old, new in CONTROLS[:1] if sample else CONTROLS:
            source, macros = instances[instance]
            failed += must_fail(compiler, source, instance, macros, options, file, old, new)
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
